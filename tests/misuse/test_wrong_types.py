"""Arguments of a wrong type raise a `ValueError` that names one, and never an error inside JAX."""

import dataclasses
import inspect
import operator
import types

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxcomp

pytestmark = pytest.mark.wrong_types

MESH = jax.make_mesh((1,), ("data",))
LIKE = {"w": jnp.ones((64, 64))}
CODEC = jaxcomp.qsgd_inf(bits=4)
TX = jaxcomp.compressed_mean(CODEC, "data")
NETWORK = jaxcomp.planning.Network(1e9, 1e-4)
LOSS = jaxcomp.planning.Loss(100, 2.5, 33.6, 0.084, 33.2, learning_rate=0.01)
MACHINE = jaxcomp.planning.Machine(5, cycles=1e8, frequency=2e9, power=1.5, rate=5e6, levels=9)
WRONG = (1, "x", None, object(), [1], -3, lambda: 0)

FAMILIES = ("graphs", "planning", "theory")
"""Modules whose names are tried beside those of `jaxcomp` itself."""

ANYTHING = {"Description", "Key", "PerWorker", "consensus", "gathered", "state_specs", "view"}
"""Containers, and functions of trees that may have any leaves."""

WITHOUT = {
    "Aggregate",
    "Codec",
    "Feedback",
    "Gate",
    "Graph",
    "Period",
    "Reducer",
    "NoFeedback",
    "MessageError",
    "graphs.Complete",
    "graphs.Exponential",
    "graphs.OnePeer",
    "graphs.RandomPairs",
    "graphs.Ring",
    "planning.measure",
}
"""Interfaces, what has no settings, and what is cached by its arguments."""


def is_public(name, made):
    return callable(made) and name[0] != "_" and not isinstance(made, types.ModuleType)


def public():
    yield from (name for name, made in inspect.getmembers(jaxcomp) if is_public(name, made))
    for family in FAMILIES:
        for name, made in inspect.getmembers(getattr(jaxcomp, family)):
            # A dataclass that checks nothing is the result of a function.
            result = dataclasses.is_dataclass(made) and "__post_init__" not in vars(made)
            if is_public(name, made) and not result:
                yield f"{family}.{name}"


def calls(made):
    """Calls with a wrong value for all that is required, or for one setting if nothing is."""
    required = [p for p in inspect.signature(made).parameters.values() if p.default is p.empty]
    named = {p.name for p in required if p.kind is p.KEYWORD_ONLY}
    for wrong in WRONG:
        if required:
            yield [wrong] * (len(required) - len(named)), dict.fromkeys(named, wrong)
            continue
        for name in inspect.signature(made).parameters:
            yield [], {name: wrong}


@pytest.mark.parametrize("name", sorted(set(public()) - ANYTHING - WITHOUT))
def test_every_public_name_refuses_wrong_types_in_its_own_words(name):
    """What accepts a value, such as `bucket_size=1`, may do so; what refuses it names it."""
    made, said = operator.attrgetter(name)(jaxcomp), []
    for args, settings in calls(made):
        try:
            made(*args, **settings)
        except ValueError as error:
            said.append(str(error))
    assert said
    assert [text for text in said if "`" not in text] == []


@pytest.mark.parametrize(
    ("call", "said"),
    {
        "everything": (lambda: jaxcomp.init_state(1, 2, 3, 4), "`tx` must be an optax transf"),
        "a codec as tx": (lambda: jaxcomp.init_state(CODEC, LIKE, MESH, "data"), "`tx` must be"),
        "no mesh": (lambda: jaxcomp.init_state(TX, LIKE, "data", MESH), "`mesh` must be a jax"),
        "no axis": (lambda: jaxcomp.init_state(TX, LIKE, MESH, "dat"), "`axis_name` must name"),
        "place": (
            lambda: jaxcomp.place(LIKE, MESH, "dat"),
            "axes of the mesh .'data',., got 'dat'",
        ),
        "a made step": (lambda: jaxcomp.data_parallel(3, MESH, "data"), "`step` must be a func"),
        "donated": (
            lambda: jaxcomp.data_parallel(lambda x: x, MESH, "data", donate_argnums="x"),
            "`donate_argnums` must be numbers of arguments of the step, got 'x'",
        ),
        "a loss": (lambda: jaxcomp.value_and_grad(3, "data"), "`loss_fn` must be a function"),
        "optax.sgd": (
            lambda: jaxcomp.local_updates(optax.sgd, None, "data", every=2),
            "`inner` must be an optax transformation, such as optax.sgd",
        ),
        "a flag": (lambda: jaxcomp.compressed_mean(CODEC, "data", stats="all"), "True, False"),
        "workers": (lambda: jaxcomp.describe(CODEC, LIKE, workers="8"), "`workers` must be an int"),
        "codecs": (
            lambda: jaxcomp.plan(100, 4, NETWORK, codecs=[CODEC]),
            "`codecs` must be codecs or reducers by name",
        ),
        "network": (lambda: jaxcomp.plan(100, 4, 1e9), "`network` must be a jaxcomp.planning.Net"),
        "an axis by number": (lambda: jaxcomp.local(LIKE, 0), "`axis_name` must be an axis of the"),
        "a lowered program": (
            lambda: jaxcomp.collective_bytes(jax.jit(lambda x: x + x).lower(1.0)),
            "`compiled` must be a compiled program, got a lowered one",
        ),
        "a gate of a graph": (
            lambda: jaxcomp.gossip(optax.sgd(0.1), CODEC, "data", gate=jaxcomp.gates.Every(2)),
            "`gate` must be None, .*; use every=2 .* or jaxcomp.graphs.Without",
        ),
        "a rate of text": (
            lambda: jaxcomp.algorithms.mcm(CODEC, "data", learning_rate="1e-3"),
            "`learning_rate` must be a number at least 0.0, got '1e-3'",
        ),
        "clients": (
            lambda: jaxcomp.planning.fedpaq_time(
                50, 1000, iterations=40, steps=5, participants=25, levels=1
            ),
            r"`clients` must be a jaxcomp.planning.Clients\(number=50",
        ),
        "one machine": (
            lambda: jaxcomp.planning.plan_genqsgd(LOSS, MACHINE, MACHINE, error=1.0, seconds=9.0),
            "`classes` must be a tuple or a list",
        ),
        "rounds of a number": (lambda: jaxcomp.planning.rounds(9), "`plan` must be a plan of jaxc"),
        "local steps": (
            lambda: jaxcomp.algorithms.genqsgd(CODEC, "data", learning_rate=0.1, local_steps=4),
            "`local_steps` must be a tuple or a list, got 4",
        ),
    }.values(),
)
def test_one_wrong_argument_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()
