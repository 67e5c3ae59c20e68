"""The number that a loss of Keras is divided by, and loss scaling."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.adapters.keras.framework import Layer, keras

_BY_WEIGHT = "mean_with_sample_weight"
_MEANS = ("sum_over_batch_size", "mean", _BY_WEIGHT)


class _Reader(Layer):
    """Hands the mask of its input to a function: Keras gives it to a layer that asks for it."""

    def __init__(self, tell: Callable[[Any], None]):
        super().__init__(autocast=False)
        self._tell, self.supports_masking = tell, True

    def call(self, inputs: Any, mask: Any = None) -> Any:
        self._tell(mask)
        return inputs


def masks_of(y_pred: Any) -> list:
    """The mask of each output, or None."""
    found = []
    for y in keras.tree.flatten(y_pred):
        _Reader(found.append)(y)
    return found


def reductions(loss: Any) -> set[str]:
    """The kinds of means that a loss is.

    Raises:
        ValueError: for a sum.
    """
    losses = [one for one in keras.tree.flatten(loss) if one is not None]
    found = {getattr(one, "reduction", _MEANS[0]) for one in losses}
    for one in found:
        if one not in _MEANS:
            raise ValueError(
                f"`loss` must be a mean over the batch, with reduction={_MEANS[0]!r} or "
                f"{_BY_WEIGHT!r}, got reduction={one!r}: use the default reduction"
            )
    return found


def is_weighted(loss: Any, sample_weight: Any) -> bool:
    """Whether a loss is divided by the sum of the sample weights."""
    return _BY_WEIGHT in reductions(loss) and sample_weight is not None


def denominator(loss: Any, masks: list, sample_weight: Any) -> Any:
    """The number that the loss of this part of the batch is divided by.

    Raises:
        ValueError: for several outputs, whose numbers may differ.
    """
    kinds, weights = reductions(loss), keras.tree.flatten(sample_weight)
    if len(masks) > 1 or len(weights) > 1 or len(kinds) > 1:
        raise ValueError(
            "`model` must have one output if a loss counts only some examples (a mask, or "
            f"reduction={_BY_WEIGHT!r}), got {len(masks)} outputs, {len(weights)} sample weights "
            f"and the reductions {sorted(kinds)}: one count weighs all losses"
        )
    mask, weight = masks[0], weights[0]
    if _BY_WEIGHT not in kinds:
        return mask.astype(jnp.float32).sum()
    weight = jnp.float32(1) if weight is None else weight.astype(jnp.float32)
    if mask is None:
        return weight.sum()
    return (mask * weight.reshape(weight.shape + (1,) * (mask.ndim - weight.ndim))).sum()


def scale_of(optimizer: Any, values: list) -> Any:
    """The present factor of loss scaling; None if there is none."""
    kind = keras.optimizers.LossScaleOptimizer
    if not isinstance(optimizer, kind) and not optimizer.loss_scale_factor:
        return None
    mapping = list(zip(optimizer.variables, values, strict=True))
    with keras.StatelessScope(state_mapping=mapping):
        return jnp.asarray(optimizer.scale_loss(jnp.float32(1)))


def unscaled(loss_fn: Any, argnums: Any, has_aux: bool) -> Any:
    """`jax.value_and_grad` of a scaled loss, with the value and gradients of the plain one.

    Memory then fits, whatever the next scale is.
    """
    scaled = jax.value_and_grad(loss_fn, argnums=argnums, has_aux=has_aux)

    def run(*args: Any) -> Any:
        (_, aux), grads = scaled(*args)
        plain, scale = aux.pop("loss"), aux.pop("scale")
        if scale is not None:
            finite = [jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]
            aux["finite"] = jnp.stack(finite).all().astype(jnp.float32)
            grads = jax.tree.map(lambda g: (g / scale).astype(g.dtype), grads)
        return (plain, aux), grads

    return run


def rescaled(grad: Any, scale: Any, finite: Any) -> Any:
    """A gradient as the optimizer expects it: scaled, NaN if that of one device is not finite.

    The sign of Inf is finite, so that the scale would never fall.
    """
    return jnp.where(finite == 1, (grad * scale).astype(grad.dtype), jnp.nan)
