"""Methods by their names, of a sharded model: each device sends its shard."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.sharding import QUICK, TWO, crossings, local_likes, put
from helpers.suite import few_or_all
from jax.sharding import PartitionSpec as P

import jaxcomp

SHAPES, SPECS = {"in": (64, 256), "out": (256, 64)}, {"in": P(None, "fsdp"), "out": P("fsdp")}
SIGN, QSGD, TOP = jaxcomp.sign(), jaxcomp.qsgd_inf(bits=4), jaxcomp.top_k(0.1)


def first(make, codec, **settings):
    return lambda **specs: make(codec, "dcn", learning_rate=0.01, **settings, **specs)


SGD = optax.sgd(0.01)


def mean(make, codec, **settings):
    return lambda **specs: optax.chain(make(codec, "dcn", **settings, **specs), SGD)


def named(make, **settings):
    return lambda **specs: optax.chain(make("dcn", **settings, **specs), SGD)


def neolithic(**specs):
    both_ways = jaxcomp.algorithms.neolithic(SIGN, "dcn", stages=2, **specs)
    return jaxcomp.accumulate(optax.chain(both_ways, SGD), "dcn", every=2)


L1, TERNARY = jaxcomp.optimizers.L1(1e-3), jaxcomp.threshold_ternary()
METHODS = {
    "ef21_bc": mean(jaxcomp.algorithms.ef21_bc, SIGN),
    "one_bit_adam": mean(jaxcomp.algorithms.one_bit_adam, SIGN, freeze_step=1),
    "local_sgd": first(jaxcomp.algorithms.local_sgd, QSGD, every=2, momentum=0.9),
    "choco_sgd": first(jaxcomp.algorithms.choco_sgd, TOP, mixing=0.5),
}
ALL = METHODS | {
    "ef_sgd": mean(jaxcomp.algorithms.ef_sgd, TOP),
    "ef_signsgd": named(jaxcomp.algorithms.ef_signsgd),
    "signsgd": named(jaxcomp.algorithms.signsgd, momentum=0.9),
    "double_squeeze": mean(jaxcomp.algorithms.double_squeeze, SIGN),
    "neolithic": neolithic,
    "ef21": mean(jaxcomp.algorithms.ef21, TOP),
    "ef21_sgdm": mean(jaxcomp.algorithms.ef21_sgdm, TOP),
    "cd_adam": mean(jaxcomp.algorithms.cd_adam, SIGN),
    "diana": mean(jaxcomp.algorithms.diana, QSGD),
    "artemis": mean(jaxcomp.algorithms.artemis, QSGD),
    "dore": mean(jaxcomp.algorithms.dore, QSGD, down=SIGN),
    "qcmd_adagrad": first(jaxcomp.algorithms.qcmd_adagrad, TERNARY, regularizer=L1),
    "qrda_adagrad": first(jaxcomp.algorithms.qrda_adagrad, TERNARY, regularizer=L1),
    "dq_psgd": first(jaxcomp.algorithms.dq_psgd, QSGD, projection=lambda tree: tree),
    "zero_one_adam": first(jaxcomp.algorithms.zero_one_adam, SIGN, freeze_step=1),
    "deepsqueeze": first(
        jaxcomp.algorithms.deepsqueeze, SIGN, mixing=0.5, graph=jaxcomp.graphs.OnePeer()
    ),
    "dcd": first(jaxcomp.algorithms.dcd, TOP),
    "several rounds": lambda **specs: jaxcomp.gossip(
        SGD, jaxcomp.Gossip(QSGD), "dcn", rounds=2, **specs
    ),
    "gradient_tracking": first(jaxcomp.algorithms.gradient_tracking, TOP, mixing=0.5),
    "noloco": first(
        jaxcomp.algorithms.noloco, QSGD, every=2, graph=jaxcomp.graphs.OnePeer(), inner=SGD
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", few_or_all(METHODS, ALL))
@pytest.mark.filterwarnings("error::UserWarning")  # Such as that leaves will be gathered.
def test_each_shard_of_a_method_crosses_alone(name, two):
    tx = ALL[name](param_specs=SPECS)
    rng = np.random.default_rng(0)
    drawn = {k: rng.standard_normal(s).astype(np.float32) / 16 for k, s in SHAPES.items()}
    params = put(drawn, two, SPECS)
    state = jaxcomp.init_state(tx, params, two, "dcn")

    def step(params, state, x):
        at = jaxcomp.view(params, state)
        grads = jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"] - x) ** 2))(
            jaxcomp.local(at, "dcn")
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run, x = jaxcomp.data_parallel(step, two, "dcn"), jnp.ones((16, 64))
    compiled = run.lower(params, state, x).compile(QUICK)
    slow, _ = crossings(compiled)
    dense = jaxcomp.wire_bytes(jaxcomp.Dense(), local_likes(SHAPES, SPECS, TWO), workers=2)
    warmed = dense if name in ("one_bit_adam", "zero_one_adam") else 0  # Both are in the program.
    assert 0 < slow - warmed < dense / 2
    for _ in range(2):
        params, state = run(params, state, x)
    for key, leaf in params.items():
        assert leaf.sharding.spec == SPECS[key]
    for key, leaf in jaxcomp.consensus(params, state).items():
        assert np.isfinite(leaf).all()
        assert np.any(leaf != drawn[key])
