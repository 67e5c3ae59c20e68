"""Bytes that a reducer's collectives send, read from its traced program, without devices."""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.base import Reducer
from jaxcomp.exchange import legs
from jaxcomp.exchange.plan import Plan
from jaxcomp.numerics import noise
from jaxcomp.testing.programs import SEED
from jaxcomp.types import PyTree
from jaxcomp.wire import cost

_ALL_REDUCES = ("pmax", "pmin", "psum", "psum_invariant")


class Sent(NamedTuple):
    """A collective.

    Attributes:
        op: the name of its primitive.
        size: the bytes that one device sends, on average over all devices.
        dtype: the dtype of what is sent.
    """

    op: str
    size: Fraction | int
    dtype: Any


def assert_costs(reducer: Reducer, like: PyTree, sizes: tuple[int, ...]) -> None:
    """Checks `costs`, and the facts that the collectives show.

    Its collectives must send the bytes of `costs`; the payload must be split into as many as
    `collectives` says, and dense leaves be sent in `dtype`.

    Args:
        reducer: the reducer.
        like: shapes and dtypes of the leaves.
        sizes: the number of workers along each axis.

    Raises:
        AssertionError: with the bytes of the program and those of `costs`.
    """
    for _, phase in reducer.facts.phases:
        assert_costs(phase, like, sizes)
    if reducer.facts.phases:
        return
    names = tuple(f"workers{i}" for i in range(len(sizes)))
    plan = Plan.of(reducer, like, names if len(names) > 1 else "workers0", sizes)
    inner, key, likes = plan.reducer, noise.raw(SEED), plan.likes

    def run(message: Any) -> Any:
        got = legs.collect(plan, key, message, legs.init(plan))
        return legs.spread(plan, key, got.value, got.state)[0]

    axis_env = list(zip(names, sizes, strict=True))
    sent = list(_collectives(jax.make_jaxpr(run, axis_env=axis_env)(likes), dict(axis_env)))
    found, claimed = sum(one.size for one in sent), plan.costs.link_bytes
    # Four bytes are a weight; a buffer ends on a word.
    if abs(found - claimed) > 64 + claimed / 100:
        raise AssertionError(
            f"{reducer!r}: collectives send {float(found):.0f} bytes for the compressed leaves, "
            f"and costs(plan).link_bytes says {float(claimed):.0f}"
        )
    large = [one for one in sent if 4 * one.size > found and one.op in ("all_gather", "all_to_all")]
    allowed = inner.facts.collectives
    if allowed is not None and len(large) > 2 * allowed:
        raise AssertionError(
            f"{reducer!r}: facts must have collectives={-(-len(large) // 2)} or more, since the "
            f"payload is split into {len(large)} both ways, got {allowed}"
        )
    dense = [plan.layout.likes[number] for number in plan.layout.dense]
    moved = jax.make_jaxpr(plan.dense_mean, axis_env=axis_env)(dense)
    dtypes = {np.dtype(one.dtype) for one in _collectives(moved, dict(axis_env))}
    wanted = {np.dtype(x.dtype) for x in plan.dense_likes}
    if dtypes - wanted:
        raise AssertionError(
            f"{reducer!r}: facts have dtype={reducer.facts.dtype!r}, but dense leaves are sent in "
            f"{sorted(map(str, dtypes))}"
        )


def _collectives(program: Any, sizes: dict[str, int]) -> Iterator[Sent]:
    """The collectives of a program.

    Of a conditional, those of the branch that sends least: a TPU's pads buffers, and agreements of
    some steps are not counted in `costs`.
    """
    inner = getattr(program, "jaxpr", program)
    for eqn in inner.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "cond":
            branches = [list(_collectives(branch, sizes)) for branch in params["branches"]]
            yield from min(branches, key=lambda sent: sum(one.size for one in sent))
            continue
        for value in params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(part, "jaxpr", part), "eqns"):
                    yield from list(_collectives(part, sizes)) * params.get("length", 1)
        axes = params.get("axes", params.get("axis_name", ()))
        over = [axis for axis in (axes if isinstance(axes, tuple) else (axes,)) if axis in sizes]
        if not over or name == "axis_index":
            continue
        n = math.prod(sizes[axis] for axis in over)
        for atom in eqn.invars:
            given = math.prod(atom.aval.shape) * jnp.dtype(atom.aval.dtype).itemsize
            yield Sent(name, _sent(name, params, given, n), atom.aval.dtype)


def _sent(name: str, params: dict[str, Any], given: int, n: int) -> Fraction | int:
    """The bytes that one of `n` devices sends of an operand, with the usual ring algorithms."""
    if name in _ALL_REDUCES:
        return cost.ring(given, n)
    if name == "ppermute":
        others = sum(source != target for source, target in params["perm"])
        return given * Fraction(others, n)
    if name.startswith("all_gather"):
        return given * (n - 1)
    return Fraction(given * (n - 1), n)
