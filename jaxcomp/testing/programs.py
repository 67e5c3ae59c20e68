"""The programs that the checks of a codec share, so that each is compiled a few times only."""

import functools

import jax
import jax.numpy as jnp

from jaxcomp.base import Codec
from jaxcomp.layout import trees
from jaxcomp.numerics import noise
from jaxcomp.types import Array, PyTree

SEED = 20240229


# One program for the checks of a codec, and one for many keys and inputs at once.
def there_and_back(codec: Codec, key: Array, x: Array) -> tuple[PyTree, Array]:
    """The payload, and what it is decoded to."""
    payload = trees.encode(codec, key, x)
    return payload, trees.decode(codec, key, payload, x)


compiled = jax.jit(there_and_back, static_argnums=0)
MANY = 128


@functools.partial(jax.jit, static_argnums=0)
def many(codec: Codec, keys: Array, xs: Array) -> tuple[PyTree, Array]:
    """`there_and_back` for `MANY` keys and inputs at once."""
    return jax.vmap(functools.partial(there_and_back, codec))(keys, xs)


def keys(start: int = 0) -> Array:
    """`MANY` keys, from number `start` on."""
    numbers = start + jnp.arange(MANY, dtype=jnp.uint32)
    return jax.vmap(lambda i: noise.fold(noise.raw(SEED), i))(numbers)
