"""A transformation whose state is made on a mesh, for frameworks that call `tx.init` themselves."""

from typing import Any

import optax
from jax.sharding import Mesh

from jaxcomp import checks
from jaxcomp.backend import axes
from jaxcomp.mesh import data_parallel, placement
from jaxcomp.types import AxisName, PyTree


def on_mesh(tx: Any, mesh: Mesh, axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
    """The transformation `tx`, whose `init` makes the state on a mesh, as `jaxcomp.init_state`.

    Frameworks such as flax call `tx.init` themselves, in `nnx.Optimizer` and in
    `TrainState.create`. There it makes the memory of one worker, into which no checkpoint of a run
    can be restored, or raises, where memory depends on the number of workers. With
    `on_mesh(tx, mesh, axis_name)` the state has the memory of all workers from the start.

    Inside a mapped function `init` is that of `tx`, and `update` always is.

    Args:
        tx: the whole optax chain, with its `compressed_mean`.
        mesh: the device mesh of the state.
        axis_name: the axis or axes that the workers are on.

    Raises:
        ValueError: if `tx` is not an optax transformation, or the mesh has no such axis.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jaxcomp
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> mean = jaxcomp.compressed_mean(jaxcomp.sign(), axis_name="data")
        >>> tx = on_mesh(optax.chain(mean, optax.adam(1e-3)), mesh, "data")
        >>> state = tx.init({"w": jnp.ones((64, 64))})
        >>> state[0].memory.feedback.tree.residual[0].sharding.spec
        P('data',)
    """
    checks.transformation("tx", tx)
    placement.check_axes(mesh, axis_name)

    def init_fn(params: PyTree) -> Any:
        if axes.known(axis_name):
            return tx.init(params)
        return data_parallel.init_state(tx, params, mesh, axis_name)

    update = optax.with_extra_args_support(tx).update
    made = optax.GradientTransformationExtraArgs(init_fn, update)
    vars(made).update(getattr(tx, "__dict__", {}))  # What `local_updates` adds.
    return made
