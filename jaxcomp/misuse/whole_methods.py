"""Refuses an optimizer after a method that takes the descent step itself.

The frames of optax's chains hold their parts in local variables, and the closure of a part holds
the factor by which it scales.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec

import optax

from jaxcomp import checks
from jaxcomp.backend import xla
from jaxcomp.misuse import optax_wrappers

_Settings = ParamSpec("_Settings")


def whole(
    method: Callable[_Settings, optax.GradientTransformationExtraArgs],
) -> Callable[_Settings, optax.GradientTransformationExtraArgs]:
    """Decorates a method that includes its own descent step, so no optimizer may follow it."""

    @functools.wraps(method)
    def make(
        *args: _Settings.args, **kwargs: _Settings.kwargs
    ) -> optax.GradientTransformationExtraArgs:
        if "learning_rate" in kwargs:
            checks.rate(kwargs["learning_rate"])
        return last(method(*args, **kwargs), method.__name__)

    return make


def last(
    tx: optax.GradientTransformationExtraArgs, name: str
) -> optax.GradientTransformationExtraArgs:
    """The transformation of a method of this name, which raises before an optimizer in a chain."""

    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        _check_last(name)
        return tx.update(updates, state, params, **extra)

    made = tx._replace(update=update_fn)
    vars(made).update(vars(tx))  # What `local_updates` adds to it.
    return made


def _check_last(name: str) -> None:
    for later in _later():
        turning = [part for part in later if _sign(part) < 0]
        if len(turning) % 2 and not (len(turning) == 1 and _is_negation(turning[0])):
            raise ValueError(
                f"jaxcomp.algorithms.{name} must not stand before an optimizer in optax.chain: it "
                "takes the descent step itself, with its own `learning_rate`, and the optimizer "
                "would turn the step round, so the loss would rise. Use "
                f"jaxcomp.algorithms.{name} alone, or give the optimizer a mean: "
                "optax.chain(jaxcomp.compressed_mean(...), opt), or a method that returns one, "
                "such as jaxcomp.algorithms.ef21(...) without `learning_rate`."
            )


def _later() -> Iterator[list[Any]]:
    """For each chain among the callers, the updates that it runs after the called one."""
    for frame in optax_wrappers.frames():
        name, _, inner = frame.f_code.co_qualname.partition(".")
        if name not in _CHAINS or inner != "<locals>.update_fn":
            continue
        if optax_wrappers.is_optax(frame.f_globals.get("__name__")):
            inside = frame.f_locals
            called = inside["fn"] if "fn" in inside else getattr(inside.get("tx"), "update", None)
            parts = _parts(inside)
            found = [at for at, part in enumerate(parts) if part is called]
            yield parts[found[0] + 1 :] if found else []


_CHAINS = ("chain", "named_chain")


def _parts(inside: dict[str, Any]) -> list[Any]:
    """The updates of a chain, from its variables."""
    named = [tx.update for _, tx in inside.get("transforms", ())]
    return list(inside.get("update_fns", named))


def _sign(update: Any) -> int:
    """The sign that a transformation gives to updates: -1 if it is known to negate them, else 1."""
    name, held = _name(update), _held(update)
    if name in _CHAINS:
        return math.prod(_sign(part) for part in _parts(held))
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
    held = value.values() if isinstance(value, dict) else [value]
    return [tx.update for tx in held if isinstance(tx, optax.GradientTransformation)]


def _name(update: Any) -> str:
    """The name of the optax function that made it, or an empty string."""
    if not optax_wrappers.is_optax(getattr(update, "__module__", None)):
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
