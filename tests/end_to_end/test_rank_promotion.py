"""A representative of each family traces where JAX refuses to add axes by itself."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import methods, suite
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import gates
from jaxcomp.numerics import noise

PARAMS = {"w": jnp.zeros((64, 40)), "b": jnp.zeros(5), "s": jnp.zeros(())}
"""A batch of several leaves, of which one is a scalar."""

KEPT, TRACKED = (jaxcomp.Link(methods.TOP, m) for m in (jaxcomp.Residual(), jaxcomp.Shift()))
BALLOT = methods.everywhere(jaxcomp.codecs.Ballot())
SHARED = methods.everywhere(jaxcomp.terngrad(shared=True))
MEANS = {
    "dense": (jaxcomp.Dense(), {}),
    "gather": (jaxcomp.Gather(methods.QSGD), {}),
    "two-shot": (jaxcomp.TwoShot(methods.FOUR), {}),
    "psum": (SHARED, {}),
    "vote": (jaxcomp.Vote(BALLOT), {}),
    "power iteration": (jaxcomp.PowerIteration(rank=2), {}),
    "robust": (jaxcomp.Robust(methods.QSGD, jaxcomp.aggregates.Credible()), {}),
    "residual": (KEPT, {"stats": True}),
    "shift": (TRACKED, {"gate": gates.Censored(0.1)}),
    "sampled": (methods.QSGD, {"gate": gates.SampledWorkers(3)}),
}
CODECS = [
    *suite.FEW,
    *suite.VARIANTS,
    jaxcomp.huffman_nuqsgd(),
    jaxcomp.codecs.BestOf(bucket_size=512),
    jaxcomp.msc(jaxcomp.natural(), 2),
]
METHODS = [
    *("sparseloco", "streaming_diloco", "neolithic", "mcm", "qcmd_adagrad", "one_bit_adam"),
    *("demo_sgd", "choco_sgd", "gradient_tracking", "noloco"),
]


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.mark.core("Cast(dtype='float16',b=512)0")
@pytest.mark.parametrize("codec", CODECS, ids=suite.label)
def test_codecs(codec):
    key, x = noise.raw(5), jax.ShapeDtypeStruct((3, 77), jnp.float32)
    assert jax.eval_shape(functools.partial(jaxcomp.roundtrip, codec), key, x).shape == x.shape


def check(tx, mesh, axis_name):
    """Traces two steps, the first with a new state."""

    def steps(params, grads):
        state = tx.init(params)
        for _ in range(2):
            at = jaxcomp.view(params, state)
            updates, state = tx.update(jax.tree.map(lambda g: g[0], grads), state, at)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda p: p[None], params)

    own = P(axis_name)
    mapped = jax.shard_map(steps, mesh=mesh, in_specs=(P(), own), out_specs=own, check_vma=False)
    grads = jax.tree.map(lambda p: jnp.zeros((8, *p.shape)), PARAMS)
    made = jax.eval_shape(mapped, PARAMS, grads)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, grads)


@pytest.mark.core("dense")
@pytest.mark.parametrize("name", MEANS)
def test_means(name, mesh):
    given, settings = MEANS[name]
    mean = jaxcomp.compressed_mean(given, "data", **settings)
    local = jaxcomp.per_worker(optax.trace(0.9))
    tx = jaxcomp.accumulate(optax.chain(local, jaxcomp.skip_nonfinite(mean)), "data", every=2)
    check(tx if name == "gather" else mean, mesh, "data")


@pytest.mark.core("sparseloco")
@pytest.mark.parametrize("name", METHODS)
def test_methods(name):
    make, codec = (methods.METHODS | methods.GOSSIP)[name]
    auto = (jax.sharding.AxisType.Auto,)
    check(make(codec, 0.1), jax.make_mesh((8,), (methods.AXIS,), axis_types=auto), methods.AXIS)
