"""Each combination of codec, feedback, reducer and gate either converges or is refused with advice.

The table is generated. Most combinations are slow; the others pair every part with several parts.
"""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.suite import slow

import jaxcomp
from jaxcomp.testing import problems

WORKERS, STEPS = 4, 160
CLOSED = {"every": 2, "phase": 3, "coin": 2}
"""Gates that hold only one round in so many steps, and how many."""
PROBLEM = problems.quadratics(workers=WORKERS, size=24, rows=60)

CODECS = {
    "qsgd_inf": jaxcomp.qsgd_inf(bits=4, bucket_size=8),
    "qsgd": jaxcomp.qsgd(bits=2, bucket_size=8),
    "sign": jaxcomp.sign(bucket_size=8),
    "top_k": jaxcomp.top_k(fraction=0.25),
    "random_k": jaxcomp.random_k(fraction=0.25, bucket_size=8),
    "shared": jaxcomp.terngrad(clip=None, shared=True, bucket_size=8),
    "eden": jaxcomp.eden(bits=4, bucket_size=8),
    "identity": jaxcomp.codecs.Identity(),
    "ballot": jaxcomp.codecs.Ballot(bucket_size=8),
}
FEEDBACKS = {
    "none": jaxcomp.NoFeedback(),
    "residual": jaxcomp.Residual(),
    "8-bit": jaxcomp.Residual(dtype="int8"),
    "ef21": jaxcomp.Shift(),
    "diana": jaxcomp.Shift(step=0.1),
    "momentum": jaxcomp.MomentumCorrection(momentum=0.5),
}
REDUCERS = {
    "gather": jaxcomp.Gather,
    "two_shot": jaxcomp.TwoShot,
    "both_ways": lambda link: jaxcomp.TwoShot(link, link),
    "psum": jaxcomp.Psum,
    "chosen": lambda link: link,
    "hierarchy": lambda link: jaxcomp.Hierarchical(jaxcomp.Dense(), jaxcomp.Gather(link)),
    "vote": jaxcomp.Vote,
}
GATES = {
    "open": None,
    "every": jaxcomp.gates.Every(2),
    "phase": jaxcomp.gates.Phase(3),
    "bernoulli": jaxcomp.gates.Bernoulli(0.5),
    "sampled": jaxcomp.gates.SampledWorkers(2),
    "coin": jaxcomp.gates.Coin(0.5),
    "censored": jaxcomp.gates.Censored(0.1),
}
ALL = list(itertools.product(CODECS, FEEDBACKS, REDUCERS, GATES))
START = {"x": jnp.zeros((1, PROBLEM.solution.size))}


def transformation(codec, feedback, reducer, gate):
    """The mean that is made of these four, or a `ValueError`."""
    link = jaxcomp.Link(jaxcomp.Policy(CODECS[codec], min_size=0, min_ndim=0), FEEDBACKS[feedback])
    axis = ("slow", "fast") if reducer == "hierarchy" else "workers"
    return jaxcomp.compressed_mean(REDUCERS[reducer](link), axis, gate=GATES[gate], key=3)


def sizes(reducer):
    return {"slow": 2, "fast": 2} if reducer == "hierarchy" else {"workers": WORKERS}


def over(f, reducer, arguments):
    """`f` over all workers, given leading axes of `[slow, fast]` or `[workers]`."""
    for name in reversed(sizes(reducer)):
        f = jax.vmap(f, in_axes=arguments, axis_name=name)
    return f


def pace(case):
    """The step length and the number of steps: as many rounds with every gate."""
    codec, feedback, reducer, gate = case
    rate, steps = 0.1 / PROBLEM.smoothness, STEPS * CLOSED.get(gate, 1)
    if reducer == "vote":
        rate = 0.004
    noisy = (codec, feedback) in (("random_k", "none"), ("shared", "momentum"))
    if noisy and reducer == "both_ways":
        # A variance of three on either way is one of fifteen in all, and momentum on both makes
        # steps four times as long: they must be shorter for the noise to settle.
        rate, steps = rate / 4, 4 * steps
    return rate, steps


def verdict(case):
    """None if the four go together, else why not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Some combinations only warn.
        try:
            transformation(*case)
        except ValueError as error:
            return str(error)
    return None


def test_what_is_forbidden_says_what_would_work():
    """All pairs of the four kinds, around parts that go with most."""
    usual = {0: "qsgd_inf", 1: "none", 2: "gather", 3: "open"}
    seen = set()
    for first, second in itertools.combinations(range(4), 2):
        for case in ALL:
            if all(case[i] == usual[i] for i in range(4) if i not in (first, second)):
                seen.add(case)
    forbidden = {case: why for case in seen if (why := verdict(case)) is not None}
    for case, why in forbidden.items():
        assert why.startswith("`"), (case, why)  # The argument,
        assert "must" in why or "needs" in why, (case, why)  # what it must be,
        assert "jaxcomp." in why or "Link(" in why or "Shift" in why, (case, why)  # what would do.
    assert ("qsgd_inf", "none", "psum", "open") in forbidden  # Not summable.
    assert ("sign", "diana", "gather", "open") in forbidden  # Biased.
    assert ("qsgd", "ef21", "gather", "open") in forbidden  # Too noisy for whole steps.
    assert ("qsgd_inf", "none", "vote", "open") in forbidden  # Not a ballot.
    assert ("qsgd_inf", "none", "gather", "censored") in forbidden  # Nothing to compare with.
    assert ("qsgd_inf", "none", "two_shot", "open") not in forbidden


CASES = [
    ("qsgd_inf", "none", "two_shot", "bernoulli"),
    ("qsgd_inf", "diana", "gather", "bernoulli"),
    ("sign", "ef21", "both_ways", "open"),
    ("sign", "ef21", "gather", "censored"),
    ("sign", "residual", "chosen", "every"),
    ("sign", "8-bit", "both_ways", "coin"),
    ("top_k", "residual", "hierarchy", "phase"),
    ("top_k", "momentum", "gather", "every"),
    ("top_k", "momentum", "both_ways", "sampled"),
    ("random_k", "none", "psum", "sampled"),
    ("random_k", "diana", "psum", "coin"),
    ("shared", "none", "psum", "bernoulli"),
    ("eden", "none", "both_ways", "open"),
    ("eden", "none", "chosen", "sampled"),
    ("identity", "ef21", "psum", "censored"),
    ("identity", "momentum", "psum", "every"),
    ("identity", "residual", "two_shot", "phase"),
    ("ballot", "none", "vote", "open"),
    ("ballot", "none", "vote", "bernoulli"),
]


@pytest.mark.core("identity-momentum-psum-every")
@pytest.mark.parametrize(
    "case", [*CASES, *(slow(case) for case in ALL if case not in CASES)], ids="-".join
)
def test_what_is_allowed_converges(case):
    why = verdict(case)
    if why is not None:
        assert case not in CASES, why
        return
    reducer = case[2]
    shape = tuple(sizes(reducer).values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        rate, steps = pace(case)
        tx = optax.chain(transformation(*case), optax.sgd(rate))
        matrices = PROBLEM.matrices.reshape(*shape, *PROBLEM.matrices.shape[1:])
        targets = PROBLEM.targets.reshape(*shape, -1)

        def one(params, matrix, target, state):
            off = matrix @ params["x"][0] - target
            grads = {"x": (matrix.T @ off + PROBLEM.ridge * params["x"][0])[None]}
            return tx.update(grads, state, params)

        everyone = over(one, reducer, (None, 0, 0, 0))

        def step(carry, _):
            params, state = carry
            updates, state = everyone(params, matrices, targets, state)
            changes = updates["x"].reshape(-1, 24)
            alike = jnp.all((changes == changes[:1]) | ~jnp.isfinite(changes))
            params = {"x": params["x"] + changes[:1]}
            return (params, state), (PROBLEM.error(params["x"][0]), alike)

        @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
        def run():
            init = over(lambda _: tx.init(START), reducer, 0)
            state = init(jnp.zeros(shape))
            return jax.lax.scan(step, (START, state), None, length=steps)[1]

        try:
            error, alike = run()
        except ValueError as refused:  # For these workers and sizes, which only the run knows.
            if case in CASES or not str(refused).startswith("`step` must be below"):
                raise
            return
    assert bool(alike.all())
    assert np.isfinite(error).all()
    assert float(error[-20:].mean()) < 0.5, error[-1]
