"""Decentralised methods through links of four bits, signs and the largest elements.

For `gossip.py`: the step sizes of CHOCO, every method through every link on workers that differ,
and the distance between models against the learning rate.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import track

import jaxcomp
from jaxcomp import algorithms, graphs
from jaxcomp.testing import problems
from jaxcomp.testing.mingling import mingle

AXIS = "workers"


def everywhere(codec: Any) -> jaxcomp.Policy:
    return jaxcomp.Policy(codec, min_size=0, min_ndim=0)


IDENTITY = everywhere(jaxcomp.codecs.Identity())
CODECS = {
    "4 bits": everywhere(jaxcomp.qsgd_inf(bits=4, bucket_size=50)),
    "sign": everywhere(jaxcomp.sign(bucket_size=None)),
    "top 10 %": everywhere(jaxcomp.top_k(0.1)),
}
MEMORIES = {
    "4 bits": jaxcomp.NoFeedback(),
    "sign": jaxcomp.Residual(),
    "top 10 %": jaxcomp.Residual(),
}


def spread(models: Any) -> Any:
    return jnp.sum((models - models.mean(axis=0)) ** 2) / len(models)


def choco(steps: int = 3000) -> list[dict[str, Any]]:
    """Random models on a ring of 16, the largest tenth of 50 elements.

    The variance is that of the models after the last step over that at the start.
    """
    start = np.random.default_rng(0).standard_normal((16, 50))
    first = float(spread(jnp.asarray(start)))
    still = lambda worker, step: (jnp.zeros_like, jnp.zeros_like)  # noqa: E731
    found = []
    for mixing in (0.05, 0.2, 0.34, 0.5):
        tx = algorithms.choco_sgd(CODECS["top 10 %"], AXIS, learning_rate=0.0, mixing=mixing)
        measure = lambda x: (spread(x), jnp.max(jnp.abs(x.mean(axis=0) - start.mean(axis=0))))  # noqa: E731
        (variance, moved), _ = mingle(
            tx, still, measure, workers=16, size=50, steps=steps, start=jnp.asarray(start)
        )
        last = {"variance": float(variance[-1]) / first, "moved": float(moved[-1])}
        found.append({"mixing": mixing, "steps": steps, **last})
    return found


def methods() -> dict[str, tuple[Callable[[Any], Any], float]]:
    """By name, a method of a codec's name, and half of the messages that it sends in a step."""
    rate = 0.05

    def plain(make: Any, **settings: Any) -> Any:
        def of(name: str) -> Any:
            sent = IDENTITY if name == "dense" else jaxcomp.Link(CODECS[name], MEMORIES[name])
            return make(sent, AXIS, **settings)

        return of

    def coded(make: Any, **settings: Any) -> Any:
        return lambda name: make(IDENTITY if name == "dense" else CODECS[name], AXIS, **settings)

    inner = {"inner": optax.sgd(rate)}
    return {
        "D-PSGD": (plain(algorithms.dpsgd, learning_rate=rate, mixing=0.3), 1),
        "CHOCO-SGD": (coded(algorithms.choco_sgd, learning_rate=rate, mixing=0.3), 1),
        "DeepSqueeze": (coded(algorithms.deepsqueeze, learning_rate=rate, mixing=0.3), 1),
        "DeepSqueeze, one peer": (
            coded(algorithms.deepsqueeze, learning_rate=rate, mixing=0.3, graph=graphs.OnePeer()),
            0.5,
        ),
        "DeepSqueeze, pairs": (
            coded(
                algorithms.deepsqueeze, learning_rate=rate, mixing=0.3, graph=graphs.RandomPairs()
            ),
            0.5,
        ),
        "DCD": (coded(algorithms.dcd, learning_rate=rate), 1),
        "DCD, η 0.03": (coded(algorithms.dcd, learning_rate=0.03), 1),
        "gradient tracking": (
            coded(algorithms.gradient_tracking, learning_rate=0.5 * rate, mixing=0.2),
            2,
        ),
        "NoLoCo": (plain(algorithms.noloco, every=10, **inner), 1),
        "DSPG": (
            plain(algorithms.dspg, learning_rate=lambda t: 0.3 / jnp.sqrt(1.0 + t), mixing=0.3),
            1,
        ),
        "DPSVRG": (plain(algorithms.dpsvrg, learning_rate=rate, mixing=0.3), 1),
    }


def links(steps: int = 2000) -> dict[str, Any]:
    """Full gradients of workers that differ: 50 elements, eight workers on a ring."""
    problem, found = problems.quadratics(), {}
    matrices, targets = problem.data

    def oracle(worker: Any, step: Any) -> Any:
        def whole(x: Any) -> Any:
            return problem.gradient(x, matrices[worker], targets[worker])

        return whole, whole

    def measure(models: Any) -> Any:
        return problem.error(models.mean(axis=0)), spread(models)

    for name, (make, messages) in track(methods().items(), "links"):
        for codec in ("dense", *CODECS):
            tx = make(codec)
            (error, apart), _ = mingle(tx, oracle, measure, workers=8, size=50, steps=steps)
            given = IDENTITY if codec == "dense" else CODECS[codec]
            payload = 8 * jaxcomp.wire_bytes(given, jnp.zeros((1, 50)))
            bits = payload * messages * 2 / 50
            if name == "NoLoCo":
                bits *= 1 / 2 / 10
            if name == "DPSVRG":
                position = np.asarray(jaxcomp.gates.Growing(10, 1.5).position(np.arange(steps)))
                bits *= float(np.mean(np.minimum(position + 1, 8)))
            found[f"{name}, {codec}"] = {"error": error, "apart": apart, "bits": bits}
    return found


def means(steps: int = 2000) -> dict[str, Any]:
    """QSVRG and SGD behind the same means: the same workers, minibatches of ten of 100 rows."""
    found, rate = {}, 0.01
    for codec in ("dense", *CODECS):
        reducer: Any = jaxcomp.Dense()
        if codec != "dense":
            memory = jaxcomp.Shift() if codec != "4 bits" else jaxcomp.Shift(0.5)
            reducer = jaxcomp.Gather(jaxcomp.Link(CODECS[codec], memory))
        sgd = optax.chain(jaxcomp.compressed_mean(reducer, AXIS), optax.sgd(rate))
        qsvrg = optax.chain(algorithms.qsvrg(reducer, AXIS, every=50), optax.sgd(rate))
        bits = 8 * jaxcomp.wire_bytes(reducer, jnp.zeros((1, 50)), workers=8) / 50
        for name, tx in {"SGD, mean of all": sgd, "QSVRG, mean of all": qsvrg}.items():
            error = averaged(optax.with_extra_args_support(tx), steps)
            found[f"{name}, {codec}"] = {"error": error, "apart": np.zeros(steps), "bits": bits}
    return found


def averaged(tx: Any, steps: int, rows: int = 10) -> np.ndarray:
    """The error of parameters that are the same on all workers, after each step."""
    problem = problems.quadratics()
    matrices, targets = problem.data
    workers, params = jnp.arange(len(matrices)), {"x": jnp.zeros((1, 50))}

    def one(params: Any, state: Any, worker: Any, step: Any) -> tuple[Any, Any]:
        a, b = matrices[worker], targets[worker]
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), worker)
        which, times = jax.random.randint(key, (rows,), 0, len(a)), (len(a) / rows) ** 0.5

        def grad_fn(at: Any) -> Any:
            return {"x": problem.gradient(at["x"][0], times * a[which], times * b[which])[None]}

        def full_grad_fn(at: Any) -> Any:
            return {"x": problem.gradient(at["x"][0], a, b)[None]}

        given = {"grad_fn": grad_fn, "full_grad_fn": full_grad_fn}
        return tx.update(grad_fn(params), state, params, **given)

    everyone = jax.vmap(one, (None, 0, 0, None), axis_name=AXIS)

    def step(carry: Any, number: Any) -> tuple[Any, Any]:
        params, state = carry
        updates, state = everyone(params, state, workers, number)
        params = {"x": params["x"] + updates["x"][0]}
        return (params, state), problem.error(params["x"][0])

    @jax.jit
    def run() -> Any:
        state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(workers)
        return jax.lax.scan(step, (params, state), jnp.arange(steps))[1]

    return np.asarray(run())


def drift(steps: int = 3000) -> list[dict[str, Any]]:
    """D-PSGD of workers that differ, with constant rates."""
    problem = problems.quadratics()
    matrices, targets = problem.data

    def oracle(worker: Any, step: Any) -> Any:
        def whole(x: Any) -> Any:
            return problem.gradient(x, matrices[worker], targets[worker])

        return whole, whole

    found = []
    for rate in (0.02, 0.01, 0.005, 0.0025):
        tx = algorithms.dpsgd(IDENTITY, AXIS, learning_rate=rate)
        apart, _ = mingle(tx, oracle, spread, workers=8, size=50, steps=steps)
        found.append(
            {"rate": rate, "apart": float(apart[-1]), "constant": float(apart[-1]) / rate**2}
        )
    return found
