"""Finds the callers of a transformation: wrappers and conditionals around it, parts after it.

A transformation is not told what it is wrapped in. The frames that call it know: they are named
after the wrappers, and optax's chain holds its parts in local variables.
"""

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ParamSpec

import optax

from jaxcomp import checks
from jaxcomp.backend import xla
from jaxcomp.misuse import lines

_Settings = ParamSpec("_Settings")

_GATES = (
    "each worker would decide by its own gradients, and where some take the step and others do "
    "not, those wait for an exchange that never comes. "
)

_WRAPPERS = {
    "apply_if_finite": _GATES
    + "Use jaxcomp.skip_nonfinite(optax.chain(compressed_mean(...), opt)), which decides by the "
    "mean.",
    "conditionally_transform": _GATES
    + "Wrap only what comes after the mean, or leave out steps with a gate: "
    "compressed_mean(..., gate=jaxcomp.gates...).",
    "conditionally_mask": _GATES
    + "Wrap only what comes after the mean, or leave out steps with a gate: "
    "compressed_mean(..., gate=jaxcomp.gates...).",
    "MultiSteps": "its accumulator would hold each worker's own gradients as if they were "
    "replicated. Accumulate after the mean, optax.chain(compressed_mean(...), "
    "optax.MultiSteps(opt, k)), or before it, with nothing sent in between, "
    "jaxcomp.accumulate(optax.chain(compressed_mean(...), opt), axis_name, every=k).",
}
"""By the name of an optax wrapper: why it must not wrap a mean, and what works."""


def check_wrappers() -> None:
    """Refuses a call from optax that a mean over workers, and its memory, cannot follow.

    Raises:
        ValueError: if a wrapper that runs a mean in some steps only, or `tree_map_params`, calls.
    """
    for frame in _frames():
        name = frame.f_code.co_qualname.split(".", 1)[0]
        if not _is_optax(frame.f_globals.get("__name__")):
            continue
        if name == "tree_map_params":
            raise ValueError(
                "`initable` of optax.tree_utils.tree_map_params must not send over workers: their "
                "memory has another shape than the parameters, since it has a leading axis of the "
                "workers or holds several leaves as one batch. For shardings, use "
                "jaxcomp.place(state, mesh, axis_name, params=params), which takes them from the "
                "parameters. For an optimizer after the mean, map over its part of the state: "
                "tree_map_params(opt, f, state[1])."
            )
        if name in _WRAPPERS:
            raise ValueError(f"optax.{name} must not wrap compressed_mean: {_WRAPPERS[name]}")


def conditions() -> list[tuple[Any, str]]:
    """For each `jax.lax.cond` and `switch` whose branch calls: its condition, and its line."""
    found, frames = [], list(_frames())
    for number, frame in enumerate(frames):
        inside = frame.f_locals
        if str(frame.f_globals.get("__name__")).endswith(".control_flow.conditionals"):
            line = lines.of_user(
                (each.f_code.co_filename, each.f_lineno, each.f_code.co_name)
                for each in frames[number:]
            )
            found += [(inside[name], line) for name in ("pred", "index") if name in inside]
    return found


def whole(
    method: Callable[_Settings, optax.GradientTransformationExtraArgs],
) -> Callable[_Settings, optax.GradientTransformationExtraArgs]:
    """The marker of a method that includes its own descent step, so no optimizer may follow it."""

    @functools.wraps(method)
    def make(
        *args: _Settings.args, **kwargs: _Settings.kwargs
    ) -> optax.GradientTransformationExtraArgs:
        if "learning_rate" in kwargs:
            checks.rate(kwargs["learning_rate"])
        tx = method(*args, **kwargs)

        def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
            _check_last(method.__name__)
            return tx.update(updates, state, params, **extra)

        made = tx._replace(update=update_fn)
        vars(made).update(vars(tx))  # What `local_updates` adds to it.
        return made

    return make


def _check_last(name: str) -> None:
    for later in _later():
        turning = [part for part in later if _sign(part) < 0]
        if len(turning) % 2 and not (len(turning) == 1 and _is_negation(turning[0])):
            raise ValueError(
                f"jaxcomp.algorithms.{name} must not stand before an optimizer in optax.chain: it "
                "takes the descent step itself, with its own `learning_rate`, and the optimizer "
                "would turn the step round, so the loss would rise. Use "
                f"jaxcomp.algorithms.{name} alone, or give the optimizer the mean only: "
                "optax.chain(jaxcomp.compressed_mean(...), opt)."
            )


def _later() -> Iterator[list[Any]]:
    """For each chain among the callers, the updates that it runs after the called one."""
    for frame in _frames():
        name = frame.f_code.co_qualname
        if not _is_optax(frame.f_globals.get("__name__")):
            continue
        if name == "chain.<locals>.update_fn":
            inside = frame.f_locals
            yield _after(inside.get("fn"), inside.get("update_fns", ()))
        elif name == "named_chain.<locals>.update_fn":
            inside = frame.f_locals
            parts = [tx.update for _, tx in inside.get("transforms", ())]
            yield _after(getattr(inside.get("tx"), "update", None), parts)


def _after(called: Any, parts: Any) -> list[Any]:
    found = [at for at, part in enumerate(parts) if part is called]
    return list(parts[found[0] + 1 :]) if found else []


def _sign(update: Any) -> int:
    """The sign that a transformation gives to updates: -1 if it is known to negate them, else 1."""
    name, held = _name(update), _held(update)
    if name == "chain":
        return math.prod(_sign(part) for part in held.get("update_fns", ()))
    if name == "named_chain":
        return math.prod(_sign(tx.update) for _, tx in held.get("transforms", ()))
    if name == "scale":
        return -1 if _number(lambda: held["step_size"]) < 0 else 1
    if name == "scale_by_schedule":
        rate = held["step_size_fn"]
        return -1 if any(_number(lambda at=at: rate(at)) < 0 for at in _COUNTS) else 1
    if name == "inject_hyperparams":
        return _injected(held["inner_factory"], held.get("other_hps", {}))
    return min((_sign(part) for value in held.values() for part in _updates(value)), default=1)


def _is_negation(update: Any) -> bool:
    """Whether the transformation is `optax.scale(-1.0)`, as used for gradient ascent."""
    held = _held(update)
    if _name(update) == "with_extra_args_support":
        return _is_negation(held["tx"].update)
    return _name(update) == "scale" and _number(lambda: held["step_size"]) == -1


_COUNTS = (0, 1, 10, 1000, 100_000)
"""Steps at which a schedule is asked for its sign: a warm-up begins with zero."""

_OPTIMIZERS = ("optax._src.alias", "optax.contrib")


def _injected(factory: Any, settings: dict[str, Any]) -> int:
    """The sign of a transformation whose factor depends on the step; rates count as positive."""
    if getattr(factory, "__module__", "").startswith(_OPTIMIZERS):
        return -1
    try:
        rest = dict.fromkeys(set(inspect.signature(factory).parameters) - set(settings), 1.0)
        return _sign(factory(**settings, **rest).update)
    except Exception:  # It takes other arguments, so the sign is unknown.
        return 1


def _number(make: Callable[[], Any]) -> float:
    try:
        with xla.constants():
            return float(make())
    except Exception:  # A schedule of another library, or a traced number: the sign is unknown.
        return math.nan


def _updates(value: Any) -> list[Any]:
    """The updates of the transformations that a closure variable is or contains."""
    if isinstance(value, optax.GradientTransformation):
        return [value.update]
    if isinstance(value, dict):
        return [tx.update for tx in value.values() if isinstance(tx, optax.GradientTransformation)]
    return []


def _name(update: Any) -> str:
    """The name of the optax function that made it, or an empty string."""
    if not _is_optax(getattr(update, "__module__", None)):
        return ""
    return getattr(update, "__qualname__", "").split(".", 1)[0]


def _held(update: Any) -> dict[str, Any]:
    """The variables and attributes of a function, or of a method's object, by name."""
    owner = getattr(update, "__self__", None)
    if owner is not None:
        return dict(getattr(owner, "__dict__", {}))
    names = getattr(getattr(update, "__code__", None), "co_freevars", ())
    held = {}
    for name, cell in zip(names, getattr(update, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # The variable is not assigned yet.
            held[name] = cell.cell_contents
    return held


def _frames() -> Iterator[FrameType]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_optax(module: Any) -> bool:
    return isinstance(module, str) and module.split(".", 1)[0] == "optax"
