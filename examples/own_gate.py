"""A custom gate, with the contract check of the library's own gates."""

import dataclasses

import jax.numpy as jnp

import jaxcomp
from jaxcomp.base import Opened


@dataclasses.dataclass(frozen=True)
class Slowing(jaxcomp.Gate):
    """Sends in every step of the first `often` ones, then in every `every`-th."""

    often: int = 100
    every: int = 4
    closes = True  # There are steps in which nobody sends.

    def init(self, like):
        return jnp.zeros((), jnp.int32)

    def open(self, key, tree, state, axis_name, params=None):
        go = (state < self.often) | (state % self.every == 0)
        return Opened(go, None, state + 1)  # None: all workers take part.


if __name__ == "__main__":
    jaxcomp.testing.check_gate(Slowing(often=2))
    print("Slowing passes the contract")
