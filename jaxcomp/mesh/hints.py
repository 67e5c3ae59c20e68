"""Notes on errors of other libraries in a training step, with advice."""

import contextlib
from collections.abc import Iterator

from jaxcomp.base import adapter
from jaxcomp.types import AxisName

_OF_CONSTRAINTS = (
    "jaxcomp: inside of the step, each worker has its own part of the batch, and nothing is split "
    "over {axis!r}. Leave with_sharding_constraint and reshard out where they name {axis!r}, or "
    "have them name other axes of the mesh only, as with_sharding_constraint(x, "
    "PartitionSpec(None, 'model')), without a mesh."
)

_OF_LOOPS = (
    "jaxcomp: gradients of jaxcomp.local parameters differ between the workers of {axis!r}, and "
    "what a loop begins with, or a branch of a conditional returns, must be typed so too. In code "
    "of yours, take jaxcomp.local(zeros, {axis!r}), or the zeros_like of the local parameters. In "
    "code of a library, such as an RNN, give data_parallel check_vma=False: JAX then tracks no "
    "types, and the results of the first call are compared between the workers."
)

_OF_CHAINS = (
    "jaxcomp: this state is not one of this chain. Make it with jaxcomp.init_state(tx, params, "
    "mesh, axis_name), or bring the moments of another chain, such as one without "
    "compressed_mean, with jaxcomp.graft(tx, state, params, mesh, axis_name)."
)

_OF_CLOSURES = (
    "jaxcomp: the step uses an array or a key from outside that lies on the mesh. Pass it to the "
    "step as an argument: arguments that are no batches are the same on all workers. Fold a key "
    "with the worker's index, jax.random.fold_in(key, jax.lax.axis_index({axis!r})), or pass it on "
    "to the loss of jaxcomp.value_and_grad, which folds it."
)

_OF_CALLBACKS = (
    "jaxcomp: each worker of {axis!r} consists of several devices here, and JAX runs io_callback "
    "and pure_callback only where a worker is one device. Take jax.debug.callback, which returns "
    "nothing, or call the host outside of the step, on what the step returns."
)

_OF_HOSTS = (
    "jaxcomp: an argument lies in the memory of the host. Move it first thing in the step, as in "
    "state = jax.device_put(state, jax.memory.Space.Device), and what the step returns back to it."
)

_OF_NESTED = (
    "jaxcomp: inside of the step {axis!r} is manual already. Leave mesh= out of an inner "
    "jax.shard_map, which then takes the current mesh, and name the other axes, as in "
    "jax.shard_map(f, in_specs=..., out_specs=..., axis_names={{'fsdp'}})."
)

_OF_AXES = (
    "jaxcomp: the mesh of this call has the workers on {axis!r}. Give the mean that axis, as in "
    "jaxcomp.compressed_mean(codec, {axis!r}), or the axis of the mean to data_parallel and "
    "init_state."
)

_HINTS = {
    "`tx.init` must know the number of workers of": _OF_AXES,
    "must be an axis of the surrounding mapped function": _OF_AXES,
    "should match the mesh passed to shard_map": _OF_NESTED,
    "memory_space of all inputs passed to": _OF_HOSTS,
    "callbacks are only supported in spmd computations": _OF_CALLBACKS,
    "Closing over inputs to shard_map": _OF_CLOSURES,
    "with_sharding_constraint can only refer to Auto axes": _OF_CONSTRAINTS,
    "passed to reshard cannot contain axis names": _OF_CONSTRAINTS,
    "field of ShapedArray should be of type `Manual`": _OF_CONSTRAINTS,
    "manual axis types do not match": _OF_LOOPS,
    "requires all arguments to have matching type": _OF_LOOPS,
    "The number of updates and states has to be the same in chain": _OF_CHAINS,
}
"""By parts of the error's text."""


def hints_for(error: Exception) -> list[str]:
    """The hints for an error."""
    found = [*_HINTS.items(), *(item for one in adapter.present() for item in one.hints.items())]
    texts = {(key,) if isinstance(key, str) else key: hint for key, hint in found}
    return [hint for parts, hint in texts.items() if all(part in str(error) for part in parts)]


@contextlib.contextmanager
def add_note(axis_name: AxisName) -> Iterator[None]:
    """Adds a note to an error whose text is known, and raises it again."""
    try:
        yield
    except Exception as error:
        for hint in hints_for(error):
            said = hint.format(axis=axis_name)
            if said not in getattr(error, "__notes__", []):
                error.add_note(said)
        raise
