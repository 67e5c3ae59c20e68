"""Finds the callers of a transformation: wrappers of optax and conditionals around it.

A transformation is not told what it is wrapped in. The frames that call it know: they are named
after the wrappers.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.misuse import lines
from jaxcomp.numerics import addition

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
        ValueError: if a wrapper that runs a mean in some steps only, or `tree_map_params`, calls,
            or `optax.masked` leaves out complex gradients.
    """
    apart: list[Any] = []
    for frame in frames():
        name = frame.f_code.co_qualname.split(".", 1)[0]
        if not is_optax(frame.f_globals.get("__name__")):
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
        if name == "partition":  # It names another transformation for each leaf.
            apart = []
        if name == "masked" and "masked_updates" in frame.f_locals:
            apart += _left_out(frame.f_locals["updates"], frame.f_locals["masked_updates"])
    if apart:
        raise ValueError(
            f"`mask` of optax.masked must not leave out complex leaves, got {apart[0]} without a "
            f"mean: each worker would take a step of its own. {addition.SPLIT} Leave frozen ones "
            "out with jaxcomp.freeze(tx, frozen)."
        )


def _left_out(updates: Any, masked: Any) -> list[Any]:
    """The complex dtypes of the leaves that are in the first tree alone."""
    kept = set(map(id, jax.tree.leaves(masked)))
    left = [jnp.result_type(x) for x in jax.tree.leaves(updates) if id(x) not in kept]
    return [dtype for dtype in left if jnp.issubdtype(dtype, jnp.complexfloating)]


def conditions() -> list[tuple[Any, str]]:
    """For each `jax.lax.cond` and `switch` whose branch calls: its condition, and its line."""
    found, calling = [], list(frames())[1:]  # Without this one, which the list would keep alive.
    for number, frame in enumerate(calling):
        # To read a frame's variables keeps them alive until it ends. JAX's leak checker would find
        # the tracers of a frame that makes a trace.
        if str(frame.f_globals.get("__name__")).endswith(".control_flow.conditionals"):
            inside = frame.f_locals
            line = lines.of_user(
                (each.f_code.co_filename, each.f_lineno, each.f_code.co_name)
                for each in calling[number:]
            )
            found += [(inside[name], line) for name in ("pred", "index") if name in inside]
    return found


def frames() -> Iterator[FrameType]:
    """The frames that call, from the innermost."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_optax(module: Any) -> bool:
    """Whether this is the name of a module of optax."""
    return isinstance(module, str) and module.split(".", 1)[0] == "optax"
