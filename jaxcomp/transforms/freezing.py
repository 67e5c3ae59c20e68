"""Parameters that are not trained: nothing is sent for them."""

import jax
import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.types import PyTree


def freeze(
    tx: optax.GradientTransformation, frozen: PyTree
) -> optax.GradientTransformationExtraArgs:
    """Trains the other parameters with `tx`, and sends nothing for the frozen ones.

    The updates of frozen parameters are zero, and `tx` does not see these parameters: its
    compressor has no memory for them, its optimizer has no moments for them, and no byte of their
    gradients is sent. Inside `data_parallel`, `optax.partition` with `optax.set_to_zero()` does the
    same. `freeze` also works in your own `jax.shard_map`, whose `out_specs` refuse the zeros of
    `optax.set_to_zero()`.

    Args:
        tx: for instance `optax.chain(jaxcomp.compressed_mean(...), optax.adamw(3e-4))`.
        frozen: a tree like the parameters, or a prefix of one, with True for the frozen ones; or a
            function that returns such a tree for the parameters.

    Example:
        >>> import jaxcomp
        >>> mean = jaxcomp.compressed_mean(jaxcomp.qsgd_inf(bits=4), axis_name="data")
        >>> tx = freeze(optax.chain(mean, optax.adamw(3e-4)), {"base": True, "lora": False})
    """
    checks.transformation("tx", tx)

    def labels(tree: PyTree) -> PyTree:
        mask = frozen(tree) if callable(frozen) else frozen
        return jax.tree.map(lambda stays: "frozen" if stays else "trained", mask)

    # Optax makes zeros with the gradients' type, which varies over the workers.
    return optax.partition({"trained": tx, "frozen": optax.stateless(_zeros)}, labels)


def _zeros(updates: PyTree, params: PyTree | None = None) -> PyTree:
    del params
    return jax.tree.map(lambda g: jnp.zeros(jnp.shape(g), jnp.result_type(g)), updates)
