"""Routes of legs: which fit together, and what is refused where they meet."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxcomp
from jaxcomp import aggregates
from jaxcomp.base import WrappedReducer
from jaxcomp.reducers import (
    Aggregation,
    AllGather,
    AllReduce,
    AllToAll,
    Average,
    Each,
    Join,
    Leg,
    Permute,
    Sum,
)

LIKE = {"w": jnp.zeros((64, 64))}
FOUR = jaxcomp.Link(jaxcomp.qsgd_inf(bits=4))
EXACT = jaxcomp.Link(jaxcomp.codecs.Identity())
UP, DOWN = Leg(AllToAll(), FOUR, Average()), Leg(AllGather(), EXACT, Join())
MEDIAN = Aggregation(aggregates.CoordinateMedian())


def routed(*legs):
    @dataclasses.dataclass(frozen=True)
    class Routed(jaxcomp.Reducer):
        route = legs

    return Routed()


def test_a_route_of_two_legs_is_two_shots():
    for workers in (1, 2, 3, 8):
        want = jaxcomp.wire_bytes(jaxcomp.TwoShot(FOUR), LIKE, workers)
        assert jaxcomp.wire_bytes(routed(UP, DOWN), LIKE, workers) == want


@pytest.mark.parametrize(
    ("legs", "said"),
    [
        ((UP,), "must have a second leg"),
        ((Leg(AllGather(), FOUR, Average()), DOWN), "must have a second leg"),
        ((UP, DOWN, DOWN), "must have a second leg"),
        ((UP, Leg(AllReduce(), EXACT, Sum())), "on a further leg"),
        ((Leg(AllToAll(), FOUR, MEDIAN), DOWN), r"AllToAll\(\) and Aggregation"),
        ((Leg(AllGather(), FOUR, Sum()),), r"got AllGather\(\) and Sum\(\)"),
        ((Leg(AllReduce(), EXACT, Average()),), r"got AllReduce\(\) and Average\(\)"),
        ((Leg(Permute(), FOUR, Average()),), r"got Permute\(\) and Average\(\)"),
        ((Leg(AllGather(), FOUR, Join()),), r"got AllGather\(\) and Join\(\)"),
        ((Leg(AllGather(), FOUR.codec, Average()),), r"write jaxcomp\.Link\(codec\)"),
        ((Leg(AllGather(), FOUR, Average("one")),), "must make a mean"),
        ((Leg(AllGather(), FOUR, Each()),), "must make a mean"),
    ],
)
def test_legs_that_do_not_fit_are_refused(legs, said):
    with pytest.raises(ValueError, match=said):
        jaxcomp.wire_bytes(routed(*legs), LIKE, 3)
    with pytest.raises(ValueError, match=said):
        jaxcomp.compressed_mean(routed(*legs), "data")


@pytest.mark.parametrize(
    ("link", "combine", "said"),
    [
        (jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual()), MEDIAN, "not linear"),
        (jaxcomp.Link(jaxcomp.thc()), MEDIAN, "would set them for all"),
        (jaxcomp.Link(jaxcomp.top_k(0.1), jaxcomp.Shift()), Average("senders"), "a mirror"),
        (FOUR, Average("senders"), "send every element"),
    ],
)
def test_links_that_a_combination_cannot_take_are_refused(link, combine, said):
    with pytest.raises(ValueError, match=said):
        jaxcomp.wire_bytes(routed(Leg(AllGather(), link, combine)), LIKE, 3)


def test_a_reducer_has_a_route_or_code_of_its_own():
    with pytest.raises(TypeError, match="must not define collect beside a `route`"):

        class Twice(WrappedReducer):
            reducer: jaxcomp.Reducer

            def collect(self, plan, key, message, state, weight=None):
                return self.reducer.collect(plan, key, message, state, weight)

    with pytest.raises(TypeError, match="or define `uplink`, `collect` and `costs`"):

        class Blind(jaxcomp.Reducer):
            def collect(self, plan, key, message, state, weight=None):
                raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Present(jaxcomp.Feedback):
    """The mean over the workers that take part, which divides by their share."""

    def init(self, like, part_like):
        return ()

    def compensate(self, x, state):
        return x, state

    def update(self, message, sent, part, share, weight, state):
        return jax.tree.map(lambda x: x / share, part), state


def test_the_share_of_two_shots_is_typed_as_the_same_on_all_workers():
    """Dense leaves are divided by it, and are results of a typed step."""
    link = jaxcomp.Link(FOUR.codec, Present())
    gate = jaxcomp.gates.SampledWorkers(2)
    tx = jaxcomp.compressed_mean(jaxcomp.TwoShot(link, FOUR.codec), "data", gate=gate)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("data",), axis_types=auto, devices=jax.devices()[:4])
    params = LIKE | {"b": jnp.zeros(3)}

    def step(state, x):
        grads = jax.tree.map(lambda p: jnp.zeros_like(p) + x[0], params)
        return tx.update(grads, state)[0]

    state = jaxcomp.init_state(tx, params, mesh, "data")
    specs = jaxcomp.state_specs(state, "data"), jax.P("data")
    run = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P())
    jax.eval_shape(run, state, jnp.ones(4))
