"""A custom codec in a dozen lines, with the contract check of the library's own codecs."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

import jaxcomp


class Payload(NamedTuple):
    mantissas: jnp.ndarray  # Every array of a payload has a leading axis of buckets.
    scales: jnp.ndarray


@dataclasses.dataclass(frozen=True)
class Int8(jaxcomp.Codec):
    """Each element in 1/127 of its bucket's largest, to nearest."""

    bucket_size: int | None = 256
    unbiased = False  # Rounding to nearest is biased, but its error is below its input:
    # compressed_mean adds a residual by itself.
    facts = jaxcomp.base.Facts(bits_per_element=8 + 32 / 256)

    def encode(self, key, x, count, state):
        scales = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=1)
        unit = jnp.where(scales > 0, 127 / scales, 0)
        return Payload(jnp.round(x * unit[:, None]).astype(jnp.int8), scales), state

    def decode(self, key, payload, like, side=None):
        return (payload.mantissas * (payload.scales / 127)[:, None]).astype(like.dtype)


if __name__ == "__main__":
    try:
        jaxcomp.testing.check_codec(Int8())
        print("Int8 passes the contract")
    except AssertionError as error:
        print(f"Int8 breaks the contract: {error}")
