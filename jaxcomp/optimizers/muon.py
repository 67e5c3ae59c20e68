"""Inner optimizers of DiLoCo and MuLoCo, with their authors' constants."""

from typing import Any

import jax
import optax

DECAY = 1e-4
"""The weight decay of MuLoCo's published configurations."""


def diloco_adamw() -> optax.GradientTransformation:
    """AdamW with the constants of the open reproduction of DiLoCo (OpenDiLoCo)."""
    return optax.adamw(4e-4, 0.9, 0.95, weight_decay=0.1)


def muon_by_shape(learning_rate: Any) -> optax.GradientTransformation:
    """Muon without Nesterov momentum, `√(out/in)` for each matrix, and AdamW for the rest.

    Optax's has other factors for shapes.

    Args:
        learning_rate: a number or an optax schedule.

    References:
        Thérien et al., `MuLoCo: Muon is a practical inner optimizer for DiLoCo
        <https://arxiv.org/abs/2505.23725>`_, 2025, and its code.
    """

    def dimensions(updates: Any) -> Any:
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), updates)

    def scale(update: jax.Array) -> jax.Array:  # A kernel of shape `(in, out)`.
        return update * (update.shape[1] / update.shape[0]) ** 0.5

    matrices = optax.chain(
        optax.contrib.scale_by_muon(beta=0.9, nesterov=False, weight_dimension_numbers=dimensions),
        optax.stateless(lambda updates, _: jax.tree.map(scale, updates)),
        optax.add_decayed_weights(DECAY),
        optax.scale_by_learning_rate(learning_rate),
    )
    rest = optax.adamw(learning_rate, 0.9, 0.99, weight_decay=DECAY)
    return optax.partition(
        {"matrix": matrices, "rest": rest},
        lambda params: jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "rest", params),
    )
