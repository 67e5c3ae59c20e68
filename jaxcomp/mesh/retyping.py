"""Narrows types: a value computed only from replicated values is typed as replicated.

JAX types `zeros_like(x)` as varying over workers if `x` varies, although zeros are the same
everywhere. A frozen leaf of `optax.set_to_zero` would therefore be refused as a result. This module
runs a function again without the operations that only declare a value as varying, so that results
are typed by the values that they are computed from.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax
from jax.extend import core as jex_core

from jaxcomp.backend import axes, xla
from jaxcomp.types import Array

_DECLARATIONS = ("pvary", "pcast")
_CALLS = ("jit", "pjit")


def narrowed(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` with results typed as varying over workers only if they may differ.

    The computation is the same, operation by operation.
    """

    def run(*args: Any) -> Any:
        traced, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
        found = _run(traced, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return run


def _run(traced: Any, args: list[Array]) -> list[Array]:
    jaxpr = traced.jaxpr
    values = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, jex_core.Literal) else values[x]

    for eqn in jaxpr.eqns:
        out = _apply(eqn, [read(x) for x in eqn.invars])
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _apply(eqn: Any, given: list[Array]) -> list[Array]:
    name, params = eqn.primitive.name, eqn.params
    narrower = [axes.varying(x) < axes.varying(v) for x, v in zip(given, _types(eqn), strict=True)]
    if name in _DECLARATIONS and not _released(given[0], eqn):
        return given
    if any(narrower):
        if name in _CALLS:
            again = jax.jit(lambda *xs: _run(params["jaxpr"], list(xs)), inline=params["inline"])
            with eqn.ctx.manager:
                return again(*given)
        if name == xla.SEPARATELY:
            return _separate(params["traced"], params["lanes"])(*given)
        if name == "cond":
            params = {**params, "branches": _branches(params["branches"], given[1:])}
        elif _plain(params):
            given = list(axes.match_vma(*given))
        else:  # A collective or a loop needs its original types.
            given = [_over(x, axes.varying(v)) for x, v in zip(given, _types(eqn), strict=True)]
    bound = eqn.primitive.get_bind_params(params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*functions, *given, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


@functools.lru_cache(maxsize=1024)
def _separate(traced: Any, lanes: int) -> Callable[..., list[Array]]:
    return xla.compile_separately(lambda *xs: _run(traced, list(xs)), lanes)


def _types(eqn: Any) -> list[Any]:
    return [x.aval for x in eqn.invars]


def _released(x: Array, eqn: Any) -> bool:
    """Whether the operation declares its result as different on fewer workers, not on more."""
    return not axes.varying(x) <= axes.varying(eqn.outvars[0].aval)


def _over(x: Array, names: frozenset) -> Array:
    """The array typed as different over these axes."""
    missing = tuple(sorted(names - axes.varying(x), key=str))
    return lax.pcast(x, missing, to="varying") if missing else x


def _branches(branches: tuple, given: list[Array]) -> tuple:
    """The branches for narrower arguments; all have the widest type that one of them returns."""
    traced = [jax.make_jaxpr(lambda *xs, b=b: _run(b, list(xs)))(*given) for b in branches]
    widest = [
        frozenset().union(*map(axes.varying, column))
        for column in zip(*(one.out_avals for one in traced), strict=True)
    ]

    def wide(branch: Any) -> Callable[..., list[Array]]:
        return lambda *xs: list(map(_over, _run(branch, list(xs)), widest))

    return tuple(jax.make_jaxpr(wide(branch))(*given) for branch in branches)


def _plain(params: dict) -> bool:
    """Whether an operation neither communicates nor contains another program."""
    return not any(_is_special(value) for value in _flat(params.values()))


def _is_special(value: Any) -> bool:
    return isinstance(value, str) or hasattr(value, "eqns") or hasattr(value, "jaxpr")


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list | set | frozenset):
            yield from _flat(value)
        else:
            yield value
