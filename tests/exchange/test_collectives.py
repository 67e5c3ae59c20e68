"""Payloads reach the workers that they are for, in as many collectives as are asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxcomp.exchange import collectives
from jaxcomp.wire import buffer

WORKERS = 8
RNG = np.random.default_rng(0)
PAYLOAD = {
    "words": RNG.integers(0, 2**32, (WORKERS, WORKERS, 5, 2), np.uint64).astype(np.uint32),
    "bytes": RNG.integers(-128, 128, (WORKERS, WORKERS, 3), np.int64).astype(np.int8),
    "scales": RNG.standard_normal((WORKERS, WORKERS)).astype(np.float16),
    "none": np.zeros((WORKERS, WORKERS, 0), np.float32),
}
"""Of each worker, a row for each worker: several dtypes, shapes that fill no word, and nothing."""


def mapped(move, mesh, out_specs=P()):
    """`move` of the payload of each device; the types of JAX say whether results are replicated."""

    def body(payload):
        return move(jax.tree.map(lambda x: x[0], payload))

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=out_specs))


@pytest.mark.parametrize("parts", [1, 2])
def test_all_workers_gather_all_payloads(parts, mesh):
    run = mapped(lambda own: collectives.all_gather(own, "data", parts), mesh)
    compiled = run.lower(PAYLOAD).compile()
    jax.tree.map(np.testing.assert_array_equal, compiled(PAYLOAD), PAYLOAD)
    assert compiled.as_text().count(" all-gather(") == parts


@pytest.mark.parametrize("parts", [1, 2])
def test_every_worker_receives_the_rows_of_its_number(parts, mesh):
    def move(own):
        found = collectives.all_to_all(own, "data", parts)
        return jax.tree.map(lambda x: x[None], found)

    compiled = mapped(move, mesh, P("data")).lower(PAYLOAD).compile()
    found = compiled(PAYLOAD)
    for name, rows in PAYLOAD.items():
        np.testing.assert_array_equal(found[name], rows.swapaxes(0, 1), err_msg=name)
    assert compiled.as_text().count(" all-to-all(") == parts


def test_rows_are_exchanged_alike_by_simulated_workers():
    run = jax.vmap(lambda own: collectives.all_to_all(own, "data"), axis_name="data")
    found = jax.jit(run)(PAYLOAD)
    for name, rows in PAYLOAD.items():
        np.testing.assert_array_equal(found[name], rows.swapaxes(0, 1), err_msg=name)


def test_permutations_bring_the_buffers_of_their_sources():
    sources = [[1, 2, 3, 4, 5, 6, 7, 0], [0, 1, 2, 3, 4, 5, 6, 7], [7, 0, 1, 2, 3, 4, 5, 6]]
    words = np.asarray(jax.jit(jax.vmap(buffer.fuse))(PAYLOAD))
    run = jax.vmap(lambda x: collectives.permute(x, sources, "data"), axis_name="data")
    found = jax.jit(run)(words)
    np.testing.assert_array_equal(found, np.stack([words[np.array(s)] for s in sources], 1))


def test_no_permutation_brings_nothing():
    run = jax.vmap(lambda x: collectives.permute(x, [], "data"), axis_name="data")
    assert jax.eval_shape(run, jnp.zeros((4, 6), jnp.uint32)).shape == (4, 0, 6)
