"""Every method with a suitable codec, and its uncompressed form."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp

AXIS, SIZE = "workers", 50


def everywhere(codec):
    return jaxcomp.Policy(codec, min_size=0, min_ndim=0)


IDENTITY = everywhere(jaxcomp.codecs.Identity())
QSGD = everywhere(jaxcomp.qsgd(bits=2, bucket_size=SIZE))
TOP = everywhere(jaxcomp.top_k(fraction=0.1))
SIGN = everywhere(jaxcomp.sign(bucket_size=None))
RANDOM = everywhere(jaxcomp.random_k(fraction=0.1, bucket_size=SIZE))
RATE = 0.1


def ball(tree):
    return optax.projections.projection_l2_ball(tree, 1.5)


TERNARY = everywhere(jaxcomp.threshold_ternary(bucket_size=SIZE))
SPARSE = jaxcomp.optimizers.L1(1e-3)


def first(make, **settings):
    """A method that takes a codec and the axis, and the step itself."""
    return lambda codec, rate: make(codec, AXIS, learning_rate=rate, **settings)


def mean(make, **settings):
    """A method that returns a mean, and plain descent after it."""
    return lambda codec, rate: optax.chain(make(codec, AXIS, **settings), optax.sgd(rate))


def neolithic(codec, rate):
    """Two stages, of the gradients of two steps."""
    both_ways = jaxcomp.algorithms.neolithic(codec, AXIS, stages=2)
    return jaxcomp.accumulate(optax.chain(both_ways, optax.sgd(rate)), AXIS, every=2)


def voted(codec, rate):
    up = jaxcomp.Vote(everywhere(jaxcomp.codecs.Ballot()))
    return optax.chain(jaxcomp.algorithms.signsgd(AXIS, momentum=0.9, up=up), optax.sgd(rate))


def rounds(make, **settings):
    """A method of rounds of one step, whose inner optimizer is plain descent."""
    return lambda codec, rate: make(codec, AXIS, inner=optax.sgd(rate), every=1, **settings)


def demo_sgd(codec, rate):
    """In squares of four, subtracting the mean of all; it brings its own codec."""
    signs = jaxcomp.algorithms.demo_sgd(AXIS, k=4, chunk=4, subtract="aggregate")
    return optax.chain(signs, optax.sgd(rate))


def nesterov(rate, outer=0.7, momentum=0.9):
    return optax.chain(optax.scale(rate), optax.sgd(outer, momentum, nesterov=True))


LOCAL = {
    "local_sgd": (first(jaxcomp.algorithms.local_sgd, every=1), QSGD),
    "post_local_sgd": (
        first(jaxcomp.algorithms.post_local_sgd, synchronous=2, every=1),
        SIGN,
    ),
    "adpsgd": (first(jaxcomp.algorithms.adpsgd, warmup=100, start=1), QSGD),
    "fedpaq": (first(jaxcomp.algorithms.fedpaq, every=1), QSGD),
    "diloco": (rounds(jaxcomp.algorithms.diloco), QSGD),
    "streaming_diloco": (
        rounds(jaxcomp.algorithms.streaming_diloco, fragments=1, delay=0, mix=0.0),
        QSGD,
    ),
    "muloco": (rounds(jaxcomp.algorithms.muloco, learning_rate=RATE), SIGN),
    "sparseloco": (rounds(jaxcomp.algorithms.sparseloco), TOP),
}
"""Methods of local steps, whose state is that of `local_updates`."""
METHODS = {
    **LOCAL,
    "ef_sgd": (mean(jaxcomp.algorithms.ef_sgd), TOP),
    "ef21": (mean(jaxcomp.algorithms.ef21), TOP),
    "ef21_sgdm": (mean(jaxcomp.algorithms.ef21_sgdm, eta=0.5), TOP),
    "ef21_bc": (mean(jaxcomp.algorithms.ef21_bc), SIGN),
    "double_squeeze": (mean(jaxcomp.algorithms.double_squeeze), TOP),
    "neolithic": (neolithic, SIGN),
    "cd_adam": (mean(jaxcomp.algorithms.cd_adam), SIGN),
    "clag": (mean(jaxcomp.algorithms.clag, threshold=0.0), TOP),
    "diana": (mean(jaxcomp.algorithms.diana), QSGD),
    "marina": (mean(jaxcomp.algorithms.marina, p=0.3), RANDOM),
    "artemis": (mean(jaxcomp.algorithms.artemis), QSGD),
    "dore": (mean(jaxcomp.algorithms.dore, down=IDENTITY), QSGD),
    "mcm": (first(jaxcomp.algorithms.mcm), QSGD),
    "rand_mcm": (first(jaxcomp.algorithms.rand_mcm), QSGD),
    "censored_heavy_ball": (first(jaxcomp.algorithms.censored_heavy_ball, censoring=0.0), TOP),
    "qcmd_adagrad": (first(jaxcomp.algorithms.qcmd_adagrad, regularizer=SPARSE), TERNARY),
    "qrda_adagrad": (first(jaxcomp.algorithms.qrda_adagrad, regularizer=SPARSE), TERNARY),
    "dgd_def": (first(jaxcomp.algorithms.dgd_def), TOP),
    "dq_psgd": (first(jaxcomp.algorithms.dq_psgd, projection=ball), QSGD),
    "one_bit_adam": (mean(jaxcomp.algorithms.one_bit_adam, freeze_step=2), SIGN),
    "zero_one_adam": (first(jaxcomp.algorithms.zero_one_adam, freeze_step=2), SIGN),
    "demo_sgd": (demo_sgd, None),
    "signsgd": (voted, None),
}
"""Name to what makes it of a codec and a rate, and a codec that suits it. LAG and EF-signSGD are
settings of others; `genqsgd` has a number for each worker."""

FOUR = everywhere(jaxcomp.qsgd_inf(bits=4, bucket_size=SIZE))
PEERS = jaxcomp.graphs.OnePeer()
GOSSIP = {
    "dpsgd": (first(jaxcomp.algorithms.dpsgd, graph=PEERS), FOUR),
    "choco_sgd": (first(jaxcomp.algorithms.choco_sgd, mixing=0.3), TOP),
    "deepsqueeze": (first(jaxcomp.algorithms.deepsqueeze, mixing=0.3, graph=PEERS), SIGN),
    "dcd": (first(jaxcomp.algorithms.dcd), FOUR),
    "gradient_tracking": (first(jaxcomp.algorithms.gradient_tracking, mixing=0.3), SIGN),
    "noloco": (
        rounds(jaxcomp.algorithms.noloco, graph=jaxcomp.graphs.RandomPairs()),
        FOUR,
    ),
    "dspg": (first(jaxcomp.algorithms.dspg, regularizer=SPARSE), FOUR),
    "dpsvrg": (first(jaxcomp.algorithms.dpsvrg, regularizer=SPARSE, first=2), FOUR),
}
"""The same, of methods whose workers have models of their own."""

PARENTS = {
    "ef21_sgdm": lambda rate: optax.chain(optax.ema(0.5, debias=False), optax.sgd(rate)),
    "cd_adam": lambda rate: optax.amsgrad(rate, 0.9, 0.99),
    "censored_heavy_ball": lambda rate: optax.sgd(rate, momentum=0.4),
    "qcmd_adagrad": lambda rate: jaxcomp.optimizers.prox_adagrad(rate, SPARSE),
    "qrda_adagrad": lambda rate: jaxcomp.optimizers.rda_adagrad(rate, SPARSE),
    "diloco": nesterov,
    "streaming_diloco": nesterov,
    "muloco": lambda rate: nesterov(rate, 0.9, 0.8),
    "dq_psgd": lambda rate: optax.chain(optax.sgd(rate), jaxcomp.optimizers.projected(ball)),
}
"""Of those that are not plain descent."""
ROUNDS = {"neolithic": 2}
"""Steps to a round, between which a method stays where it is."""
ALONE = ("signsgd", "demo_sgd", "one_bit_adam", "zero_one_adam")
"""Votes and signs have no identity; of the others see `optimizers/test_optimizers.py`."""


def build(name, codec=None, rate=RATE):
    make, own = (METHODS | GOSSIP)[name]
    return make(own if codec is None else codec, rate)


def alone(tx, problem, steps):
    """The errors of a transformation that is given the mean gradient."""
    curvature = jnp.einsum("nmd,nme->de", problem.matrices, problem.matrices) / problem.workers
    pull = jnp.einsum("nmd,nm->d", problem.matrices, problem.targets) / problem.workers
    start = {"x": jnp.zeros((1, SIZE))}

    def step(carry, _):
        params, state = carry
        x = params["x"][0]
        grads = {"x": (curvature @ x - pull + problem.ridge * x)[None]}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params["x"][0]

    return np.asarray(jax.lax.scan(step, (start, tx.init(start)), None, length=steps)[1])
