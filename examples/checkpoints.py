"""Checkpoints of a run: all data for an exact continuation.

A checkpoint is a folder named after its step. It holds the arrays (parameters and optax state, the
memory of each worker on its own device) and a record (the settings that the run was started with,
and what it has measured so far). orbax writes it under another name and renames it when it is
complete, so that a run killed at any moment leaves whole checkpoints only.
"""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp


def save(folder: pathlib.Path, step: int, arrays: Any, record: dict[str, Any]) -> None:
    """Writes a checkpoint, waits until it is on the disk, and removes the ones before it."""
    args = ocp.args.Composite(
        arrays=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(record)
    )
    with manager(folder) as kept:
        kept.save(step, args=args)


def read_record(folder: pathlib.Path) -> tuple[int, dict[str, Any]] | None:
    """Step and record of the newest checkpoint in a folder; None where there is none."""
    if not folder.is_dir():
        return None
    with manager(folder) as kept:
        step = kept.latest_step()
        if step is None:
            return None
        args = ocp.args.Composite(record=ocp.args.JsonRestore())
        return step, kept.restore(step, args=args).record


def restore(folder: pathlib.Path, like: Any) -> Any:
    """The arrays of the newest checkpoint, laid out as `like` is."""
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like
    )
    args = ocp.args.Composite(arrays=ocp.args.StandardRestore(shapes))
    with manager(folder) as kept:
        return kept.restore(kept.latest_step(), args=args).arrays


def manager(folder: pathlib.Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    return ocp.CheckpointManager(folder.absolute(), options=options)


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Names the settings that have changed."""
    return [
        f"{name.replace('_', '-')} {saved.get(name)!r} (now {now.get(name)!r})"
        for name in {**saved, **now}
        if saved.get(name) != now.get(name)
    ]
