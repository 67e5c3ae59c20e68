"""Collectives over a mapped axis, and the types of their results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxcomp.backend import axes

RNG = np.random.default_rng(0)


def workers(f, *axis_names, sizes=(8,)):
    """The results of `f` on each simulated worker, one axis a dimension."""
    x = jnp.arange(np.prod(sizes), dtype=jnp.float32).reshape(sizes)
    for name in reversed(axis_names):
        f = jax.vmap(f, axis_name=name)
    return jax.jit(f)(x)


def test_outside_of_a_mapped_function_one_worker_is_assumed_or_as_many_as_planned():
    assert (axes.size("data"), axes.sizes(("slow", "fast"))) == (1, (1, 1))
    assert not axes.bound("data")
    assert not axes.known("data")
    with axes.assume_workers(4):
        assert axes.known("data")
        assert (axes.size("data"), axes.sizes(("slow", "fast"))) == (4, (4, 1))
    assert axes.size("data") == 1
    with pytest.raises(ValueError, match="`axis_name` must be an axis of the surrounding mapped"):
        axes.require("data")


def test_inside_the_axes_themselves_count():
    def look(x):
        axes.require(("slow", "fast"))
        assert axes.sizes(("slow", "fast")) == (2, 3)
        assert axes.lanes(("slow", "fast")) == ()  # All workers are simulated.
        return x

    with axes.assume_workers(5):
        workers(look, "slow", "fast", sizes=(2, 3))
    assert axes.without(("slow", "fast"), ("fast",)) == "slow"
    assert axes.without(("a", "b", "c"), ("b",)) == ("a", "c")


def test_values_of_the_first_worker_and_the_largest():
    first = workers(lambda x: axes.first({"x": x}, ("slow", "fast"))["x"], "slow", "fast",
                    sizes=(2, 3))  # fmt: skip
    assert not first.any()
    most = jax.jit(jax.vmap(lambda x: axes.maximum(x, "data"), axis_name="data"))
    rows = np.array([[0.0, 1.0, 0.0], [np.inf, 0.5, np.nan]], np.float32)
    np.testing.assert_array_equal(most(rows), np.array([[np.inf, 1, np.nan]] * 2, np.float32))


@pytest.mark.parametrize("pairs", [[(0, 3), (2, 1)], [], [(i, (i + 1) % 4) for i in range(4)]])
def test_some_workers_send_and_the_others_hear_zeros(pairs):
    found = workers(lambda x: axes.permute_some(x + 1, pairs, "data"), "data", sizes=(4,))
    want = np.zeros(4)
    for sender, to in pairs:
        want[to] = sender + 1
    np.testing.assert_array_equal(found, want)


def test_types_say_what_differs_between_workers(mesh):
    """Gathered and replicated values do not; JAX would refuse them else as results."""
    seen = []

    def look(x, same):
        own = jax.lax.axis_index("data")
        everyone = axes.everyones(own, "data")
        again = axes.type_replicated(x, "data")
        for value in (x, axes.vary(same, "data"), own, same, everyone, again):
            seen.append(axes.varies(value, "data"))
        assert axes.varying_axes(x) == {"data"}
        assert axes.varying_axes(axes.match_vma(same, x)[0]) == {"data"}
        like = axes.result((3,), jnp.int8, x)
        assert axes.varying_axes(axes.zeros(like)) == {"data"}
        return everyone

    mapped = jax.shard_map(look, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    np.testing.assert_array_equal(jax.jit(mapped)(jnp.zeros(8), jnp.zeros(3)), np.arange(8))
    assert seen == [True] * 3 + [False] * 3


@pytest.mark.core("2")
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_turns_bring_every_row_to_everyone(n, mesh):
    turns = axes._turns(n)
    parts = len(turns) // (n - 1)
    seen = {(i, to, part[i]) for ring, part in turns for i, to in enumerate(ring)}
    assert seen == {(i, j, k) for i in range(n) for j in range(n) for k in range(parts) if i != j}
    swaps = sum(ring[ring[i]] == i for ring, _ in turns for i in range(n))
    assert swaps == (0 if n % 2 or n == 4 else n)
    some = jax.sharding.Mesh(mesh.devices[:n], ("data",))
    rows = jnp.asarray(RNG.integers(0, 2**32, (n, n, 7), np.uint64), jnp.uint32)

    def mapped(move):
        own = jax.shard_map(
            lambda x: move(x[0])[None], mesh=some, in_specs=P("data"), out_specs=P("data")
        )
        return np.asarray(jax.jit(own)(rows))

    np.testing.assert_array_equal(
        mapped(lambda x: axes._in_turns(x, "data")),
        mapped(lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True)),
    )
