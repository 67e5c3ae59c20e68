"""The moments of Adam, and the point at which the second one is frozen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp import checks
from jaxcomp.optimizers import rates
from jaxcomp.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Adam:
    """How moments are kept, alike to the last bit with `optax.adam`.

    Args:
        freeze_step: the last step that may renew the second moment.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: `ε`.

    Raises:
        ValueError: for settings out of range.
    """

    freeze_step: int
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self):
        checks.integer("freeze_step", self.freeze_step, 1, rates.LAST)
        checks.number("eps", self.eps, 0.0)
        for name, decay in (("b1", self.b1), ("b2", self.b2)):
            checks.number(name, decay, 0.0, 1.0)
            if decay == 1:
                raise ValueError(f"`{name}` must be a number in [0, 1), got {decay}")

    def first(self, grads: PyTree, mu: PyTree) -> PyTree:
        """`b1·m + (1 − b1)·g`."""
        return optax.tree.cast_like(optax.tree.update_moment(grads, mu, self.b1, 1), mu)

    def second(self, grads: PyTree, nu: PyTree) -> PyTree:
        """`b2·v + (1 − b2)·g²`."""
        squared = optax.tree.update_moment_per_elem_norm(grads, nu, self.b2, 2)
        return optax.tree.cast_like(squared, nu)

    def unbiased(self, mu: PyTree, times: Array) -> PyTree:
        """`m̂`, of a first moment that has been updated so many times."""
        return optax.tree.bias_correction(mu, self.b1, times)

    def root(self, nu: PyTree, times: Array | int) -> PyTree:
        """`√v̂ + ε`, of a second moment that has been updated so many times."""
        corrected = optax.tree.bias_correction(nu, self.b2, jnp.asarray(times, jnp.int32))
        return jax.tree.map(lambda v: jnp.sqrt(v) + self.eps, corrected)


def seen(x: PyTree, nu: PyTree) -> PyTree:
    """`x`, and zero where there has been no gradient yet.

    One bit cannot say zero, and `ε` would be all that it is divided by there.
    """
    return jax.tree.map(lambda x, v: jnp.where(v > 0, x, 0), x, nu)


def doubling(step: Array, block: int) -> tuple[Array, Array]:
    """Whether a step, from 1, is one of those at intervals that double, and how many were up to it.

    The first `block` steps are, then as many at intervals of 2, then of 4, and so on.
    """
    starts = [block * (2**b - 1) for b in range(1, 31)]
    inner = np.array([start for start in starts if start < rates.LAST], np.int32)
    number = jnp.sum(step > inner, dtype=jnp.int32)
    gap = jnp.left_shift(jnp.int32(1), number)
    passed = step - block * (gap - 1)
    return passed % gap == 0, block * number + passed // gap
