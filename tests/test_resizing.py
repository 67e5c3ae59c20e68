"""Another number of workers: nothing unsent is lost, or the move is refused."""

import itertools

import jax
import jax.numpy as jnp
import methods
import numpy as np
import optax
import pytest
import resizing
from methods import METHODS, build, everywhere
from resizing import AXIS, PARAMS, check_moved, filled, shapes
from suite import CODECS, SLOW, label

import jaxcomp
from jaxcomp import workers as workers_

MOVES = [(8, 1), (8, 3), (8, 4), (1, 8)]
SIGN = everywhere(jaxcomp.sign(bucket_size=64))
TOP = everywhere(jaxcomp.top_k(fraction=0.1, bucket_size=64))
QSGD = everywhere(jaxcomp.qsgd(bits=2, bucket_size=64))
SIDCO = everywhere(jaxcomp.sidco(fraction=0.1, bucket_size=64))
ADAPTIVE = everywhere(jaxcomp.alq(bits=3, bucket_size=64))
ECSQ = everywhere(jaxcomp.ecsq(2, 4096))
HALF = jaxcomp.sign(bucket_size=20)
"""Does not divide the buckets of the uplink: four cuts of each, the last one padded."""
FEEDBACKS = {
    "residual": jaxcomp.Residual(),
    "decayed": jaxcomp.Residual(decay=0.5),
    "bfloat16": jaxcomp.Residual(dtype="bfloat16"),
    "int8": jaxcomp.Residual(dtype="int8"),
    "momentum": jaxcomp.MomentumCorrection(masking=False),
    "ef21": jaxcomp.Shift(),
    "wide ef21": jaxcomp.Shift(dtype="float32"),
}
REDUCERS = {
    "cheapest": lambda link: link,
    "gather": jaxcomp.Gather,
    "two shots": jaxcomp.TwoShot,
    "both ways": lambda link: jaxcomp.TwoShot(link, link),
    "recut": lambda link: jaxcomp.TwoShot(link, jaxcomp.Link(HALF, jaxcomp.Residual())),
    "mirrored": lambda link: jaxcomp.TwoShot(link, jaxcomp.Link(HALF, jaxcomp.Shift())),
    "phases": lambda link: jaxcomp.Phases(((0, link), (5, link))),
    "phases of shots": lambda link: jaxcomp.Phases(((0, jaxcomp.TwoShot(link, link)),)),
}


def mean(codec, **settings):
    return jaxcomp.compressed_mean(codec, AXIS, key=3, **settings)


RESIDUAL = jaxcomp.Link(SIGN, jaxcomp.Residual())
COMPOSITIONS = {
    **{
        f"{reducer}, {feedback}": lambda r=make, f=memory: mean(r(jaxcomp.Link(SIGN, f)))
        for (reducer, make), (feedback, memory) in itertools.product(
            REDUCERS.items(), FEEDBACKS.items()
        )
    },
    "diana": lambda: mean(jaxcomp.Link(QSGD, jaxcomp.Shift(step=0.02))),
    "sidco": lambda: mean(jaxcomp.TwoShot(SIDCO, SIDCO)),
    "sidco by default": lambda: mean(SIDCO),
    "levels": lambda: mean(jaxcomp.TwoShot(ADAPTIVE, ADAPTIVE)),
    "tables": lambda: mean(jaxcomp.TwoShot(ECSQ, ECSQ)),
    "sum": lambda: mean(jaxcomp.Psum(everywhere(jaxcomp.int_sgd(bucket_size=64)))),
    "vote": lambda: mean(jaxcomp.Vote(everywhere(jaxcomp.Ballot()))),
    "low rank": lambda: mean(jaxcomp.PowerIteration(rank=2)),
    "low rank in turns": lambda: mean(jaxcomp.PowerIteration(rank=2, alternate=True)),
    "coded factors": lambda: mean(jaxcomp.PowerIteration(rank=2, factors=jaxcomp.sidco(0.1, 64))),
    "gated": lambda: mean(RESIDUAL, gate=jaxcomp.Every(2), stats=True),
    "gated shifts": lambda: mean(jaxcomp.Link(SIGN, jaxcomp.Shift()), gate=jaxcomp.Bernoulli(0.5)),
    "before": lambda: optax.chain(jaxcomp.per_worker(optax.trace(0.9)), mean(TOP), optax.adam(0.1)),
    "accumulated": lambda: jaxcomp.accumulate(optax.chain(mean(SIGN), optax.adam(0.1)), 4, AXIS),
    "skipping": lambda: jaxcomp.skip_nonfinite(optax.chain(mean(SIGN), optax.sgd(0.1))),
    "displaced": lambda: jaxcomp.displaced_mean(SIGN, AXIS, learning_rate=0.1),
    "own models": lambda: jaxcomp.preserved_center(QSGD, AXIS, step=0.02, own=True),
}
WHOLE = {
    "whole": lambda: mean(jaxcomp.TwoShot(everywhere(jaxcomp.top_k(0.1)), RESIDUAL)),
    **{name: lambda name=name: build(name) for name in METHODS},
}
SMALL = {"sign": SIGN, "top": TOP}


def bucketed(name):
    """A method with its codec, in buckets that workers can share."""
    codec = METHODS[name][1]
    if codec is None or codec.codec.bucket_size is not None:
        return build(name)
    return build(name, SIGN if codec is methods.SIGN else TOP)
