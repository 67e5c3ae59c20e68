"""Parameters that are not trained: nothing is sent for them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import tree_util

from jaxcomp import checks
from jaxcomp.layout import masked
from jaxcomp.types import PyTree


def freeze(
    tx: optax.GradientTransformation, frozen: PyTree
) -> optax.GradientTransformationExtraArgs:
    """Trains the other parameters with `tx`, and sends nothing for the frozen ones.

    The updates of frozen parameters are zero, and `tx` does not see these parameters: its
    compressor has no memory for them, its optimizer has no moments for them, and no byte of their
    gradients is sent. `optax.partition` with `optax.set_to_zero()` does the same, in
    `data_parallel` too. In a `jax.shard_map` of your own with `check_vma=True`, its zeros have the
    type of the gradients, which differ between workers, so that `out_specs` refuse them.

    Args:
        tx: for instance `optax.chain(jaxcomp.compressed_mean(...), optax.adamw(3e-4))`.
        frozen: a tree like the parameters, or a prefix of one, with True for the frozen ones; or a
            function that returns such a tree for the parameters. Frozen leaves may have any dtype,
            as the integers of a quantized base model; pass `params` to the update for these.

    Example:
        >>> import jaxcomp
        >>> mean = jaxcomp.compressed_mean(jaxcomp.qsgd_inf(bits=4), axis_name="data")
        >>> tx = freeze(optax.chain(mean, optax.adamw(3e-4)), {"base": True, "lora": False})
    """
    checks.transformation("tx", tx)

    def labels(tree: PyTree) -> PyTree:
        # A module with a mask's leaves may be callable, and is no function of parameters.
        mask = frozen(tree) if callable(frozen) and tree_util.all_leaves([frozen]) else frozen
        mask = masked.visible_part(mask, tree)
        return jax.tree.map(lambda stays: "frozen" if stays else "trained", mask)

    # Optax makes zeros with the gradients' type, which varies over the workers.
    inner = optax.partition({"trained": tx, "frozen": optax.stateless(_zeros)}, labels)

    def update_fn(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        if params is not None:
            # Integers have no gradient: it is None, or of a dtype without values.
            updates = jax.tree.map(
                lambda label, own, given: _zeros(own) if label == "frozen" else given,
                labels(params),
                params,
                updates,
            )
        return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def _zeros(updates: PyTree, params: PyTree | None = None) -> PyTree:
    del params

    def zeros(leaf: Any) -> jax.Array:
        dtype = jnp.result_type(leaf)
        if dtype == jax.dtypes.float0:
            raise ValueError(
                "`params` must be given to the update, since a frozen leaf of integers has no "
                "gradient, got None: use tx.update(grads, state, params)"
            )
        return jnp.zeros(jnp.shape(leaf), dtype)

    return jax.tree.map(zeros, updates)
