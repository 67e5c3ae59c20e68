"""One of two programs runs on all workers, whatever their results have for types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxcomp.backend import axes, conditional


@pytest.mark.parametrize("go", [True, False])
def test_the_branches_may_differ_in_types_of_replication(go, mesh):
    """One gives this worker's value, the other the same zero on all."""

    def talk(x):
        return {"own": x * 2, "all": jax.lax.psum(x, "data")}

    def silent(x):
        return {"own": jnp.zeros(x.shape), "all": jnp.ones(x.shape)}

    def body(go, x):
        found = conditional.either(conditional.uniform(go[0] > 0, "data"), talk, silent, x)
        assert axes.varying_axes(found["own"]) == {"data"}
        assert not axes.varying_axes(found["all"])
        return found

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=P("data"), out_specs={"own": P("data"), "all": P()}
    )
    found = jax.jit(mapped)(jnp.full(8, int(go)), jnp.arange(8.0))
    np.testing.assert_array_equal(found["own"], 2 * np.arange(8.0) if go else np.zeros(8))
    assert found["all"].tolist() == [28.0 if go else 1.0]


def test_a_condition_that_all_share_needs_no_collective(mesh):
    def body(go, x):
        return conditional.either(conditional.uniform(go, "data"), jnp.negative, jnp.abs, x)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    text = str(jax.make_jaxpr(mapped)(jnp.array(True), jnp.arange(8.0)))
    assert "pmax" not in text
    assert "pmax" in str(
        jax.make_jaxpr(
            jax.shard_map(
                lambda go, x: body(go[0], x), mesh=mesh, in_specs=P("data"), out_specs=P("data")
            )
        )(jnp.ones(8, bool), jnp.arange(8.0))
    )
