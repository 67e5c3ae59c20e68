"""Steps whose arguments are objects that change in place, or modules with static leaves."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.modules import Repeated

import jaxcomp

MESH = jax.make_mesh((8,), ("data",))
X = jax.random.normal(jax.random.key(0), (16, 4))


@pytest.mark.parametrize("library", ["equinox", "nnx"])
def test_a_step_compiled_ahead_of_time(library):
    """Takes whole modules and objects, as the step does, and refuses other static leaves."""
    if library == "equinox":
        model = Repeated(jnp.ones((4, 4)) / 4, 2, jax.nn.relu)
        other = Repeated(model.weight, 3, jax.nn.relu)
    else:
        model = nnx.BatchNorm(4, momentum=0.5, rngs=nnx.Rngs(0))
        other = nnx.BatchNorm(4, momentum=0.5, use_bias=False, rngs=nnx.Rngs(0))

    def step(model, x, scale):
        y = model(x) if library == "nnx" else jax.vmap(model)(x)
        return None if library == "nnx" else model, jax.lax.pmean(scale * jnp.mean(y**2), "data")

    run = jaxcomp.data_parallel(step, MESH, "data", batch_argnames="x")
    stages = [run.lower(model, X, scale=2.0), run.trace(model, X, scale=2.0).lower()]
    want = run(nnx.clone(model) if library == "nnx" else model, X, scale=2.0)
    for lowered in stages:
        compiled = lowered.compile()
        assert "HloModule" in compiled.as_text()
        again = nnx.clone(model) if library == "nnx" else model
        found, loss = compiled(again, X, scale=2.0)
        np.testing.assert_array_equal(loss, want[1])
        if library == "nnx":
            np.testing.assert_allclose(again.mean[...], 0.5 * X.mean(0), rtol=1e-5)
        else:
            assert found.times == 2
        with pytest.raises(ValueError, match=r"static leaves.*compile it again"):
            compiled(other, X, scale=2.0)


def test_flax_and_equinox_are_not_imported():
    script = "import sys, jaxcomp; assert not {'flax', 'equinox'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
