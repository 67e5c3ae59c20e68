"""Transport of payloads: one collective or several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.exchange.plan import Plan

RNG = np.random.default_rng(0)
LIKE = {f"w{i}": jnp.zeros((40 + i, 64)) for i in range(5)} | {"b": jnp.zeros(7)}
GRADS = [
    jax.tree.map(lambda x: jnp.asarray(RNG.standard_normal((4, *x.shape)), x.dtype), LIKE)
    for _ in range(3)
]


@pytest.mark.core("Gather")
@pytest.mark.parametrize("kind", [jaxcomp.Gather, jaxcomp.TwoShot])
def test_the_mean_is_the_same_in_a_few_collectives(kind, mesh):
    """Of signs, which draw nothing at random; each collective is there, and no byte more."""
    link = jaxcomp.Link(jaxcomp.sign(bucket_size=64), jaxcomp.Residual())
    links = (link,) if kind is jaxcomp.Gather else (link, link)
    four = jax.sharding.Mesh(mesh.devices[:4], ("data",))
    found = {}
    for parts in (1, 3):
        reducer = kind(*links, collectives=parts)
        tx = jaxcomp.compressed_mean(reducer, "data")

        def step(state, grads, tx=tx):
            return tx.update(jax.tree.map(lambda g: g[0], grads), state)

        state = jaxcomp.init_state(tx, LIKE, four, "data")
        # Half of the time to compile, and what is compared has the same setting.
        lowered = jaxcomp.data_parallel(step, four, "data").lower(state, GRADS[0])
        run = lowered.compile({"xla_backend_optimization_level": 0})
        text = run.as_text()
        assert text.count(" all-gather(") == parts
        assert text.count(" all-to-all(") == (parts if kind is jaxcomp.TwoShot else 0)
        moved = sum(jaxcomp.collective_bytes(run).values())
        assert abs(moved - jaxcomp.wire_bytes(reducer, LIKE, workers=4)) <= 1
        for grads in GRADS:
            mean, state = run(state, jax.device_put(grads, jax.NamedSharding(four, P("data"))))
        found[parts] = mean
    jax.tree.map(np.testing.assert_array_equal, found[1], found[3])


def test_a_run_of_leaves_is_a_batch_of_its_own():
    two = jaxcomp.Gather(jaxcomp.qsgd_inf(bits=4), collectives=2)
    split = Plan.of(two, LIKE, sizes=(2,)).layout
    leaves = [{piece.leaf for piece in batch.pieces} for batch in split.batches]
    assert len(leaves) == 2
    assert not leaves[0] & leaves[1]
    large = {f"w{i}": jax.ShapeDtypeStruct((2**10, 2**10), jnp.float32) for i in range(6)}
    small = {"w": large["w0"]}
    for like, runs in ((large, 4), (small, 1), (LIKE, 1)):
        reducer = jaxcomp.TwoShot(jaxcomp.qsgd_inf(bits=4))
        assert Plan.of(reducer, like, sizes=(2,)).collectives == runs
    with pytest.raises(ValueError, match="`collectives` must be at least 1, got 0"):
        jaxcomp.Gather(jaxcomp.qsgd_inf(), collectives=0)
    with pytest.raises(ValueError, match="`collectives` must be"):
        jaxcomp.TwoShot(jaxcomp.qsgd_inf(), collectives=2.5)
