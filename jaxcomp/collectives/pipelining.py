"""Loops whose collectives run beside the computation of the iteration before or after.

A loop over layers gathers the weights of a layer in the iteration that uses them, and scatters
gradients in the iteration that makes them. No compiler starts a collective of the next iteration
in this one by itself. So the program of a loop is divided into three parts:

* ahead: collectives that do not depend on the iteration before, and their inputs;
* behind: collectives on which the next iteration does not depend, and their consumers;
* here: all else.

An iteration then runs `ahead` for the next one, and `behind` for the one before, neither of which
depends on its own `here`. The equations are those of the program before, each is run as often as
before, and one iteration more is in memory: the messages that were received, and those to be sent.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex_core
from jax.interpreters import mlir, partial_eval

from jaxcomp.backend import axes, platforms
from jaxcomp.misuse import lineage, uniform

_GROUPS = {
    *("checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2"),
}
"""Equations that are no more than their program once all derivatives are taken."""


def pipelined(f: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of trees of arrays, whose loops send beside what they compute.

    Derivatives are those of `f` itself.
    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
        given = [*closed.consts, *jax.tree.leaves(args)]
        traced = jex_core.ClosedJaxpr(_whole(closed.jaxpr), [])
        plain = jex_core.jaxpr_as_fun(traced)
        out = _pipelined.bind(*given, traced=traced) if _is_local(closed.jaxpr) else plain(*given)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


_pipelined = platforms.primitive("jaxcomp_pipelined")


def _is_local(jaxpr: Any) -> bool:
    """Whether a program has no effects but collectives."""
    return all(type(effect).__name__ == "NamedAxisEffect" for effect in jaxpr.effects)


def run_ahead(*args: Any, traced: Any) -> list[Any]:
    """Runs a program whose loops send beside what they compute."""
    return _evaluate(traced.jaxpr, args, _pipeline)


# Not on a CPU: a collective blocks the thread that computes there, and with independent ones XLA
# 0.10 sometimes lets devices of a process wait for each other for ever.
for _platform in ("cuda", "rocm", "tpu"):
    _rule = mlir.lower_fun(run_ahead, multiple_results=True)
    mlir.register_lowering(_pipelined, _rule, platform=_platform)


def _evaluate(jaxpr: Any, args: Sequence[Any], other: Callable[[Any], Any]) -> list[Any]:
    """Runs a program, and those equations for which `other` has a function by that."""
    values, waiting = dict(zip(jaxpr.invars, args, strict=True)), []

    def read(atoms: Iterable[Any]) -> list[Any]:
        return [x.val if isinstance(x, jex_core.Literal) else values[x] for x in atoms]

    for eqn in jaxpr.eqns:
        if (found := other(eqn)) is None:
            waiting.append(eqn)
            continue
        values |= _results(jaxpr, waiting, values)
        waiting = []
        values.update(zip(eqn.outvars, found(*read(eqn.invars)), strict=True))
    values |= _results(jaxpr, waiting, values)
    return read(jaxpr.outvars)


def _results(jaxpr: Any, eqns: Sequence[Any], values: Mapping[Any, Any]) -> dict[Any, Any]:
    """The results of some equations of a program, from values of its variables."""
    made = [x for eqn in eqns for x in eqn.outvars if type(x).__name__ != "DropVar"]
    known = set(made)
    taken = [x for x in _variables(x for eqn in eqns for x in eqn.invars) if x not in known]
    return dict(zip(made, _part(jaxpr, eqns, taken, made)(*map(values.get, taken)), strict=True))


def _whole(jaxpr: Any) -> Any:
    """The program with its constants as its first arguments."""
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def _part(jaxpr: Any, eqns: Sequence[Any], taken: Sequence[Any], made: Sequence[Any]) -> Any:
    """Some equations of a program as a function."""
    part = jaxpr.replace(constvars=[], invars=list(taken), outvars=list(made), eqns=list(eqns))
    return jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(part, []))


def _variables(atoms: Iterable[Any]) -> dict[Any, None]:
    return {x: None for x in atoms if not isinstance(x, jex_core.Literal)}


def _sends(eqn: Any) -> bool:
    """Whether an equation is a collective, or has one in its programs."""
    inside = (p for value in eqn.params.values() for p in lineage.programs_in(value))
    known = eqn.primitive.name in uniform.COLLECTIVES
    return known or any(_sends(inner) for program in inside for inner in program.eqns)


def _open(eqn: Any) -> Callable[..., list[Any]] | None:
    """Runs the equations of a group with collectives, without the barrier of `jax.checkpoint`.

    That barrier makes the gathers of a layer wait for the gradients of the layer after it.
    """
    if eqn.primitive.name not in _GROUPS or not _sends(eqn):
        return None
    held = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    jaxpr, consts = getattr(held, "jaxpr", held), getattr(held, "consts", ())
    return lambda *given: _evaluate(_whole(jaxpr), [*consts, *given], _open)


def _pipeline(eqn: Any) -> Callable[..., list[Any]] | None:
    """Runs a loop with collectives as one that sends ahead and behind, if it is one."""
    params = eqn.params
    if eqn.primitive.name in ("jit", "pjit") and _sends(eqn):
        closed = params["jaxpr"]
        return lambda *given: _evaluate(_whole(closed.jaxpr), [*closed.consts, *given], _pipeline)
    if eqn.primitive.name != "scan" or not _sends(eqn):
        return None
    body = params["jaxpr"].jaxpr
    dtypes = [x.aval.dtype for x in body.outvars]
    typed_keys = any(jnp.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes)
    if not params["length"] or not _is_local(body) or typed_keys:
        return None

    def run(*given: Any) -> list[Any]:
        consts, carry, xs = lineage.parts_of_scan(params, list(given))
        consts = [*params["jaxpr"].consts, *consts]
        example = *consts, *carry, *(x[0] for x in xs)
        opened = jax.make_jaxpr(lambda *args: _evaluate(_whole(body), args, _open))(*example)
        consts, jaxpr = [*opened.consts, *consts], _whole(opened.jaxpr)
        jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
        found = _run(jaxpr, params, consts, carry, xs)
        return eqn.primitive.bind(*given, **params) if found is None else found

    return run


def _divide(jaxpr: Any, consts: int, carried: int) -> tuple[list[Any], list[Any], list[Any]]:
    """The equations ahead, here and behind of a loop over constants, carried values and slices."""
    tainted = _variables(jaxpr.invars[consts : consts + carried])
    for eqn in jaxpr.eqns:
        if any(x in tainted for x in _variables(eqn.invars)):
            tainted |= dict.fromkeys(eqn.outvars)
    ahead, others, starts = [], [], set()
    needed, onward = {}, _variables(jaxpr.outvars[:carried])
    for number, eqn in reversed([*enumerate(jaxpr.eqns)]):
        free = _sends(eqn) and not any(x in tainted for x in eqn.outvars)
        if free or any(x in needed for x in eqn.outvars):
            ahead.insert(0, eqn)
            needed |= _variables(eqn.invars)
            continue
        others.insert(0, (number, eqn))
        if any(x in onward for x in eqn.outvars):
            onward |= _variables(eqn.invars)
        elif _sends(eqn):
            starts.add(number)
    here, behind, made = [], [], set()
    for number, eqn in others:
        late = number in starts or any(x in made for x in _variables(eqn.invars))
        (behind if late else here).append(eqn)
        made |= set(eqn.outvars) if late else set()
    return ahead, here, behind


def _parts(
    jaxpr: Any, divided: tuple[list[Any], ...], consts: int, carried: int
) -> tuple[Any, Any, Any, int, list[int], list[int]]:
    """The parts of a loop as functions, from their equations.

    Then the number of values that `here` leaves to `behind`, between the carried values and its
    results, and the places of the results of `here` and `behind`.
    """
    ahead, here, behind = divided
    fixed, slices = jaxpr.invars[:consts], jaxpr.invars[consts + carried :]
    results, made = jaxpr.outvars[carried:], {x for eqn in behind for x in eqn.outvars}
    late = [at for at, x in enumerate(results) if _variables([x]).keys() & made]
    early = [at for at in range(len(results)) if at not in late]
    used = _variables([*(x for eqn in (*here, *behind) for x in eqn.invars), *jaxpr.outvars])
    arrived = [x for eqn in ahead for x in eqn.outvars if x in used]
    known = {*fixed, *made}
    sent = [x for x in _variables(x for eqn in behind for x in eqn.invars) if x not in known]
    after = [*jaxpr.outvars[:carried], *sent, *(results[at] for at in early)]
    return (
        _part(jaxpr, ahead, [*fixed, *slices], arrived),
        _part(jaxpr, here, [*jaxpr.invars, *arrived], after),
        _part(jaxpr, behind, [*fixed, *sent], [results[at] for at in late]),
        len(sent),
        early,
        late,
    )


def _run(
    jaxpr: Any, params: Any, consts: list[Any], carry: list[Any], xs: list[Any]
) -> list[Any] | None:
    """The results of a loop that sends ahead and behind; None if it can do neither."""
    carried, length, likes = len(carry), params["length"], jaxpr.outvars[len(carry) :]
    divided = _divide(jaxpr, len(consts), carried)
    first, _, after = divided
    if not (first or after):
        return None
    ahead, here, behind, sent, early, late = _parts(jaxpr, divided, len(consts), carried)

    def at(number: Any) -> Any:
        return length - 1 - number if params["reverse"] else number

    def slices_of(number: Any) -> list[Any]:
        return [lax.dynamic_index_in_dim(x, at(number), keepdims=False) for x in xs]

    def put(found: list[Any], places: list[int], values: list[Any], number: Any) -> list[Any]:
        found = list(found)
        for place, x in zip(places, values, strict=True):
            found[place] = lax.dynamic_update_index_in_dim(found[place], x, at(number), 0)
        return found

    def iteration(state: Any, number: Any, *, is_first: bool = False, is_last: bool = False) -> Any:
        carry, messages, pending, found = state
        if not is_first:
            found = put(found, late, behind(*consts, *pending), number - 1)
        ahead_of_it = messages if is_last else ahead(*consts, *slices_of(number + 1))
        own = here(*consts, *carry, *slices_of(number), *messages)
        found = put(found, early, own[carried + sent :], number)
        return own[:carried], ahead_of_it, own[carried : carried + sent], found

    zeros = [axes.zeros(x.aval.update(shape=(length, *x.aval.shape))) for x in likes]
    # Not merged with the last message of another loop, which would stay in memory until here.
    begun = lax.optimization_barrier(slices_of(0)) if xs else []
    state = carry, ahead(*consts, *begun), [], zeros
    # The first iteration has none before it, and the last one none after it.
    begin, end, last = int(bool(after)), length - bool(first), length - 1
    if begin:
        state = iteration(state, 0, is_first=True, is_last=last == 0)
    if begin < end:
        state, _ = lax.scan(
            lambda state, number: (iteration(state, number), None),
            state,
            jnp.arange(begin, end),
            unroll=params["unroll"],
        )
    if end == last and (last or not begin):
        state = iteration(state, last, is_last=True)
    carry, _, pending, found = state
    return [*carry, *(put(found, late, behind(*consts, *pending), last))]
