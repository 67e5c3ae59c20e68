"""Equinox modules that several tests train."""

from collections.abc import Callable

import equinox as eqx
import jax


class Repeated(eqx.Module):
    """A module that counts with one of its leaves."""

    weight: jax.Array
    times: int
    activation: Callable

    def __call__(self, x):
        for _ in range(self.times):
            x = self.activation(x @ self.weight)
        return x
