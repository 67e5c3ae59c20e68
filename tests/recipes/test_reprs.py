"""Every setting is written as the line that builds it again, in names that are public."""

import dataclasses
import importlib
import inspect
import pkgutil

import pytest
from helpers.suite import CODECS, VARIANTS, label

import jaxcomp
from jaxcomp import aggregates, codecs, expressions, federated, gates, graphs, optimizers, reducers
from jaxcomp.base.interface import Interface

PUBLIC = (jaxcomp, aggregates, codecs, federated, gates, graphs, optimizers, reducers)
"""The modules whose names a user types."""

PARTS = (
    "quantize",
    "sparsify",
    "entropy",
    "layout.policy",
    "feedback",
    "optimizers.regularizers",
    "federated.faults",
    "federated.uplink",
)
"""Where settings are that are no codec, feedback, gate or reducer."""


def names_of(module):
    listed = getattr(module, "__all__", [name for name in vars(module) if name[0] != "_"])
    found = {name: getattr(module, name) for name in listed}
    return {name: value for name, value in found.items() if not inspect.ismodule(value)}


NAMES = {name: value for module in PUBLIC for name, value in names_of(module).items()}


def settings():
    """Every concrete class of the package that is a public setting."""
    for found in pkgutil.walk_packages(jaxcomp.__path__, "jaxcomp."):
        if found.name.endswith("__main__"):
            continue
        for name, kind in inspect.getmembers(importlib.import_module(found.name), inspect.isclass):
            if kind.__module__ != found.name or name[0] == "_":
                continue
            part = found.name.removeprefix("jaxcomp.").startswith(PARTS)
            if dataclasses.is_dataclass(kind) and (part or issubclass(kind, Interface)):
                yield kind


LINK = jaxcomp.Link(jaxcomp.top_k(0.01), jaxcomp.Residual(decay=0.9))
FOUR, NARROW = jaxcomp.qsgd_inf(bits=4), jaxcomp.qsgd_inf(bits=8, bucket_size=32)
GRID = codecs.Uniform(7)
ARGUMENTS = {
    "AdaptivePeriod": {"learning_rate": 0.1, "warmup": 50},
    "Alternating": {"graphs": (graphs.Ring(), graphs.OnePeer())},
    "Aggregation": {"aggregate": aggregates.CoordinateMedian()},
    "Aggregated": {"feedback": jaxcomp.Residual(0.9)},
    "AtLeast": {"value": 0.5, "fraction": 0.1},
    "Bernoulli": {"p": 0.5},
    "Cast": {"dtype": "float16"},
    "Censored": {"threshold": 0.1},
    "Chained": {"codecs": (jaxcomp.sign(), FOUR)},
    "Clipped": {"codec": jaxcomp.blockwise()},
    "ClippedMean": {"norm": 2.5},
    "Coded": {"codec": FOUR, "coder": jaxcomp.codecs.Rice(k=2), "capacity": 3.5},
    "Coin": {"p": 0.5},
    "Constant": {"k": 4},
    "Contractive": {"codec": FOUR},
    "Cosine": {"codec": jaxcomp.top_k(0.1, bucket_size=4096)},
    "Embedded": {"codec": FOUR, "redundancy": 1.5},
    "Every": {"k": 4},
    "Exactly": {"r": 3},
    "Fitted": {"fraction": 0.01},
    "Float": {"positive": 7, "mantissa": 1},
    "Gather": {"link": LINK},
    "Geometric": {"positive": 16},
    "Gossip": {"link": FOUR, "graph": graphs.Torus(2, 4)},
    "GroupLasso": {"weight": 0.1},
    "Growing": {"first": 10, "factor": 1.5},
    "Hierarchical": {"outer": LINK},
    "InRows": {
        "codec": jaxcomp.qsgd_inf(bits=4, bucket_size=32),
        "segments": codecs.Segments((64, 33), 32),
    },
    "Independently": {"p": 0.5},
    "L1": {"weight": 0.1},
    "L1Ball": {"radius": 2.0},
    "L2Ball": {"radius": 2.0},
    "Largest": {"fraction": 0.1},
    "Lattice": {"steps": 8},
    "Link": {"codec": jaxcomp.top_k(0.01), "feedback": jaxcomp.Shift(dtype="float32")},
    "LloydMax": {"width": 2, "law": "laplace"},
    "LowRank": {"rank": 2},
    "MidRise": {"width": 2, "cells": True},
    "Mixing": {"matrix": ((0.75, 0.25), (0.25, 0.75))},
    "Modulo": {"levels": 16},
    "NearLargest": {"fraction": 0.1},
    "Part": {"codec": FOUR, "fraction": 0.5},
    "Phase": {"start": 3, "stop": 9},
    "Policy": {"codec": FOUR, "rules": (jaxcomp.Rule("*head*", None),), "min_size": 64},
    "Psum": {"link": jaxcomp.int_sgd()},
    "Quantizer": {"levels": GRID, "scale": codecs.L2(), "rounding": codecs.Subtractive()},
    "RandomK": {"fraction": 0.1},
    "ReducerSchedule": {"phases": ((0, jaxcomp.Gather(LINK)), (5, LINK))},
    "Robust": {"link": FOUR, "aggregate": aggregates.Credible(trusted=(0, 2))},
    "Rotated": {"codec": FOUR, "shared": True},
    "Rule": {"path": "*bias", "codec": FOUR},
    "Sampled": {"fraction": 0.1},
    "SampledWorkers": {"r": 3},
    "Sparsifier": {"choice": codecs.Largest(0.1), "values": NARROW, "indices": codecs.Bitmap()},
    "Split": {"first": FOUR, "second": FOUR, "fraction": 0.5},
    "SquaredL2": {"weight": 0.1},
    "Staged": {"codec": FOUR, "stages": 2},
    "Summed": {
        "levels": GRID,
        "scale": codecs.RootMeanSquare(2.5),
        "rounding": codecs.Stochastic(),
        "limit": 7,
        "workers": 4,
    },
    "Torus": {"rows": 2, "columns": 4},
    "TwoShot": {"up": LINK, "down": LINK},
    "Uniform": {"steps": 7},
    "UniformThreshold": {"entropy": 1.5},
    "Uplink": {"link": LINK},
    "Visible": {"fraction": 0.1},
    "WideMax": {"times": 90},
    "Without": {"graph": graphs.Ring(), "silent": (3,)},
}
"""For each class whose fields have no defaults."""


def test_a_public_name_has_one_meaning():
    for module in PUBLIC:
        for name, value in names_of(module).items():
            assert value is NAMES[name], f"{module.__name__}.{name}"


@pytest.mark.parametrize("kind", list(settings()), ids=lambda kind: kind.__name__)
def test_every_class_is_written_as_the_line_that_builds_it(kind):
    setting = kind(**ARGUMENTS.get(kind.__name__, {}))
    assert eval(repr(setting), dict(NAMES)) == setting
    assert expressions.evaluate(repr(setting)) == setting  # On the command line.
    assert NAMES[kind.__name__] is kind


ALIKE = [jaxcomp.elias_qsgd(), jaxcomp.huffman_nuqsgd(), jaxcomp.amq(), jaxcomp.dsc()]
"""Recipes that the contract suites leave out of a short run."""


@pytest.mark.parametrize("codec", CODECS + VARIANTS + ALIKE, ids=label)
def test_every_recipe_is_written_as_the_line_that_builds_it(codec):
    assert eval(repr(codec), dict(NAMES)) == codec
