"""Arrays of which every process has the whole, on the devices of all processes."""

import zlib
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import NamedSharding, PartitionSpec


def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Like `jax.device_put`, for arrays that `jax.device_put` does not send to other processes.

    These are typed keys, and all arrays if processes have unequal numbers of devices.

    Raises:
        ValueError: if the processes have different values.
    """
    if (
        jax.process_count() == 1
        or isinstance(leaf, core.Tracer)
        or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable)
    ):
        return jax.device_put(leaf, sharding)
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = put(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    if len(set(Counter(device.process_index for device in jax.devices()).values())) == 1:
        # `jax.device_put` of a local JAX array to one device of each process loses its shards: its
        # `addressable_shards` raises, so that orbax cannot save it.
        return jax.device_put(np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, sharding)
    whole = np.asarray(jnp.asarray(leaf))
    _check_alike(whole, sharding)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _check_alike(whole: np.ndarray, sharding: NamedSharding) -> None:
    """Compares a checksum between the processes, as `jax.device_put` compares the values."""
    mesh, own = sharding.mesh, np.array([zlib.crc32(whole.tobytes())], np.uint32)
    sums = jax.make_array_from_callback(
        (mesh.size,), NamedSharding(mesh, PartitionSpec(mesh.axis_names)), lambda _: own
    )
    alike = jax.jit(
        lambda x: x.max() == x.min(), out_shardings=NamedSharding(mesh, PartitionSpec())
    )
    if not alike(sums):
        raise ValueError(
            "an array that all processes give must have the same value on all of them, got "
            f"different ones of shape {whole.shape} and {whole.dtype}. Arrays that differ, such as "
            "parts of a batch, are made with jax.make_array_from_process_local_data"
        )
