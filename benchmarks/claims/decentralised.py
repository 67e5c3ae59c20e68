"""Decentralised training: gossip on graphs."""

import functools
import itertools
import math
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import track

import jaxcomp
from claims.claim import Claim, decide
from jaxcomp import algorithms

GOSSIP, COMMAND = "gossip/gossip.json", "python benchmarks/gossip.py --steps 8000 --link-steps 1000"
LINKS = "Least squares of eight workers with optima of their own, on a ring, full gradients, 1,000 "
LINKS += "steps of constant length; links of 64 bits, four bits, signs and the largest tenth."
SEEDS, AXIS = 5, "workers"


def _ends(found: dict[str, Any], method: str) -> dict[str, dict[str, float]]:
    links = ("dense", "4 bits", "sign", "top 10 %")
    cases = {link: found["links"][f"{method}, {link}"] for link in links}
    return {link: {**one, "error": one["error"][-1]} for link, one in cases.items()}


def _errors(ends: dict[str, dict[str, float]]) -> str:
    return ", ".join(f"{link} {one['error']:.2g}" for link, one in ends.items())


def _drift(found: dict[str, Any]) -> tuple[str, str]:
    rows = sorted(found["drift"], key=lambda row: -row["rate"])
    halvings = [a["apart"] / b["apart"] for a, b in itertools.pairwise(rows)]
    words = ", ".join(f"{one:.2f}" for one in halvings)
    growing = halvings == sorted(halvings)
    return (
        f"each halving of the step divides the squared distance by {words}",
        decide(3.5 <= halvings[-1] <= 4.2 and growing),
    )


def _choco_linear(found: dict[str, Any]) -> tuple[str, str]:
    ends = {row["mixing"]: row["variance"] for row in found["choco"]}
    small, large = min(ends), max(ends)
    best = min(ends, key=lambda mixing: ends[mixing])
    words = ", ".join(f"{value:.0e} at γ = {mixing}" for mixing, value in ends.items())
    return f"variance of the models after 3,000 rounds: {words}", decide(
        ends[best] < 1e-20 and ends[small] < 1e-4 and best != large, part=ends[best] < 1e-20
    )


def _choco_bytes(found: dict[str, Any]) -> tuple[str, str]:
    ends = _ends(found, "CHOCO-SGD")
    saved = ends["dense"]["bits"] / ends["sign"]["bits"]
    same = ends["sign"]["error"] <= 1.05 * ends["dense"]["error"]
    words = f"signs: {saved:.0f} times fewer bits than 64-bit links; errors: {_errors(ends)}"
    return words, decide(same and saved >= 100, part=same and saved >= 10)


def _as_dpsgd(found: dict[str, Any], method: str) -> tuple[str, str]:
    """As good as D-PSGD with dense links, through each link."""
    ends, bound = _ends(found, method), 1.1 * _ends(found, "D-PSGD")["dense"]["error"]
    good = [one["error"] <= bound for one in ends.values()]
    words = f"errors: {_errors(ends)}; D-PSGD with dense links {bound / 1.1:.2g}"
    return words, decide(all(good), part=all(good[:2]))


def _tracking(found: dict[str, Any]) -> tuple[str, str]:
    ends, plain = _ends(found, "gradient tracking"), _ends(found, "D-PSGD")["dense"]["error"]
    worst = max(one["error"] for one in ends.values())
    words = f"errors: {_errors(ends)}; D-PSGD stops at {plain:.2g}"
    return words, decide(worst < 1e-5 < plain)


def _without_all_reduce(found: dict[str, Any]) -> tuple[str, str]:
    ends, plain = _ends(found, "NoLoCo"), _ends(found, "D-PSGD")["dense"]
    fewer = plain["bits"] / ends["dense"]["bits"]
    words = f"{fewer:.0f} times fewer bits; errors: {_errors(ends)}; D-PSGD {plain['error']:.2g}"
    equal = ends["dense"]["error"] <= 1.1 * plain["error"]
    return words, decide(fewer >= 10 and equal, part=fewer >= 10)


def _dpsvrg(found: dict[str, Any]) -> tuple[str, str]:
    rows = found["reduction"]["table"]
    slopes = [row["dpsvrg_slope"] for row in rows]
    plain = [row["dspg_slope"] for row in rows]
    times = [row["dspg_gradients"] / row["dpsvrg_gradients"] for row in rows]
    sent = [row["dspg_bytes"] / row["dpsvrg_bytes"] for row in rows]
    words = (
        f"slopes of the logarithms {min(slopes):.1f} to {max(slopes):.1f}, DSPG {min(plain):.1f} "
        f"to {max(plain):.1f}; the loss above its least is {min(times):.0f} to {max(times):.0e} "
        f"times less at equal gradients, {min(sent):.1f} to {max(sent):.0f} times at equal bytes"
    )
    faster = max(slopes) <= -0.9 and min(times) > 1
    return words, decide(faster and min(sent) > 1 and min(plain) > -0.9, part=faster)


def _pooled(workers: int = 8, rows: int = 24, size: int = 10) -> tuple[Any, Any, Any]:
    """Least squares whose workers draw from the same rows, and the solution."""
    draw = np.random.default_rng(0)
    a = draw.standard_normal((workers * rows, size))
    targets = a @ draw.standard_normal(size) + draw.standard_normal(len(a))
    solution, *_ = np.linalg.lstsq(a, targets, rcond=None)
    everywhere = (
        np.broadcast_to(a, (workers, *a.shape)),
        np.broadcast_to(targets, (workers, len(a))),
    )
    return *map(jnp.asarray, everywhere), jnp.asarray(solution)


def _qsvrg() -> dict[str, Any]:
    """Squared errors of QSVRG and of quantised SGD, on single rows, by step and seed."""
    jax.config.update("jax_enable_x64", True)
    rows, targets, solution = _pooled()
    workers, size = len(rows), len(solution)
    codec = jaxcomp.Policy(jaxcomp.qsgd(bits=4, bucket_size=size), min_size=0, min_ndim=0)
    marks = [500, 1000, 1500, 2000, 2500, 3000]

    def curve(tx: Any, seed: Any) -> Any:
        params = {"x": jnp.zeros((1, size))}

        def one(params: Any, state: Any, a: Any, b: Any, worker: Any, step: Any) -> Any:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), worker)
            row = jax.random.randint(key, (), 0, len(a))

            def single(at: Any) -> Any:
                return {"x": (a[row] * (a[row] @ at["x"][0] - b[row]))[None]}

            def whole(at: Any) -> Any:
                return {"x": (a.T @ (a @ at["x"][0] - b) / len(a))[None]}

            given = {"grad_fn": single, "full_grad_fn": whole}
            return tx.update(single(params), state, params, **given)

        everyone = jax.vmap(one, (None, 0, 0, 0, 0, None), axis_name=AXIS)

        def step(carry: Any, number: Any) -> Any:
            params, state = carry
            updates, state = everyone(params, state, rows, targets, jnp.arange(workers), number)
            new = {"x": params["x"] + updates["x"][0]}
            error = jnp.sum((new["x"][0] - solution) ** 2) / jnp.sum(solution**2)
            return (new, state), error

        state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(jnp.arange(workers))
        return jax.lax.scan(step, (params, state), jnp.arange(marks[-1]))[1]

    rate = 0.03
    plain = optax.chain(jaxcomp.compressed_mean(codec, AXIS), optax.sgd(rate))
    cases = {
        "QSVRG": algorithms.qsvrg(codec, AXIS, learning_rate=rate, every=60),
        "QSGD": optax.with_extra_args_support(plain),
    }
    found: dict[str, Any] = {"steps": marks}
    for name, tx in cases.items():
        run = jax.jit(functools.partial(curve, tx))
        curves = [np.asarray(run(seed)) for seed in track(range(SEEDS), description=name)]
        found[name] = [[float(one[mark - 1]) for mark in marks] for one in curves]
    return {"numbers": found}


def _linear(numbers: dict[str, Any]) -> tuple[str, str]:
    middle = [statistics.median(at) for at in zip(*numbers["QSVRG"], strict=True)]
    plain = [statistics.median(at) for at in zip(*numbers["QSGD"], strict=True)]
    # Below 1e-20 rounding is near.
    rates = [math.log10(a / b) for a, b in itertools.pairwise(middle) if a > 1e-20]
    ends = [curve[-1] for curve in numbers["QSVRG"]]
    words = (
        f"{middle[-1]:.0e} ({min(ends):.0e} to {max(ends):.0e}) after {numbers['steps'][-1]} "
        "steps, "
        f"{min(rates):.1f} to {max(rates):.1f} orders of magnitude in each {numbers['steps'][0]} "
        "until 1e-20; "
        f"QSGD stops at {plain[-1]:.0e}"
    )
    linear = min(rates) > 0.5 and plain[-1] > 0.1 * plain[0]
    return words, decide(linear and middle[-1] < 1e-3 * plain[-1], part=middle[-1] < plain[-1])


def _ended(tx: Any, task: Any) -> Any:
    """From a start and batches: the mean model of all workers at the end."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        here = jaxcomp.local(jaxcomp.view(params, state), AXIS)
        updates, state = tx.update(jax.grad(task.loss)(here, batch), state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.vmap(step, axis_name=AXIS)

    @jax.jit
    def run(params: Any, batches: Any) -> Any:
        workers = jnp.arange(task.workers)
        state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(workers)
        start = jax.tree.map(lambda x: jnp.stack([x] * task.workers), params)
        last, _ = jax.lax.scan(lambda c, batch: (mapped(*c, batch), None), (start, state), batches)
        models = jax.vmap(jaxcomp.view, axis_name=AXIS)(*last)
        return jax.tree.map(lambda x: x.mean(axis=0), models)

    return run


def _noloco() -> dict[str, Any]:
    """Bits a byte of the mean model, by method and outer rate, a value for each seed."""
    import local_methods

    rounds, every = 10, 15
    task, found = local_methods.language(rounds * every), {}
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 20, rounds * every, 1.5e-4)
    whole = jaxcomp.Policy(jaxcomp.codecs.Identity(), min_size=0, min_ndim=0)
    makers = {
        "DiLoCo": functools.partial(algorithms.diloco, jaxcomp.Dense()),
        "NoLoCo": functools.partial(algorithms.noloco, whole),
    }
    for name, make in makers.items():
        for outer in (0.5, 0.7):
            tx = make(AXIS, every=every, inner=optax.adam(rate), learning_rate=outer)
            run, title = _ended(tx, task), f"{name}, {outer}"
            found[title] = [
                task.score(run(*task.begin(seed)))["score"]
                for seed in track(range(SEEDS), description=title)
            ]
    return {"numbers": found}


def _best(numbers: dict[str, Any], name: str) -> tuple[str, list[float]]:
    mine = {key: values for key, values in numbers.items() if key.startswith(name)}
    return min(mine.items(), key=lambda item: statistics.median(item[1]))


def _against_diloco(numbers: dict[str, Any]) -> tuple[str, str]:
    (title, ours), (other, theirs) = (_best(numbers, name) for name in ("NoLoCo", "DiLoCo"))
    middles = statistics.median(ours), statistics.median(theirs)
    words = (
        f"{middles[0]:.3f} bits a byte ({min(ours):.3f} to {max(ours):.3f}; {title}), "
        f"{middles[1]:.3f} ({min(theirs):.3f} to {max(theirs):.3f}; {other}): "
        f"{100 * (middles[0] / middles[1] - 1):+.1f} %"
    )
    return words, decide(middles[0] < min(theirs), part=middles[0] <= 1.01 * middles[1])


CLAIMS = (
    Claim(
        name="dpsgd-distance",
        methods=("dpsgd",),
        source="Lian et al., Can decentralized algorithms outperform centralized algorithms?, "
        "2017, "
        "theorem on the distance from the mean model",
        claim="With a constant step η the mean squared distance of the models is O(η²), so it does "
        "not change the order of SGD's rate.",
        setting="Least squares of eight workers with optima of their own, on a ring, with steps "
        "of 0.02, 0.01, 0.005 and 0.0025.",
        judge=_drift,
        results=GOSSIP,
        command=COMMAND,
        note="O(η²) divides it by 4. The paper's times on slow links were not tried: no run over a "
        "shaped ring has been measured.",
    ),
    Claim(
        name="choco-consensus",
        methods=("choco_sgd",),
        source="Koloskova, Stich and Jaggi, Decentralized stochastic optimization and gossip "
        "algorithms with compressed communication, 2019, abstract",
        claim="CHOCO-Gossip reaches consensus at a linear rate with arbitrary compression, for a "
        "step γ that is small enough.",
        setting="Random models on a ring of 16, the largest tenth of 50 elements, 3,000 rounds.",
        judge=_choco_linear,
        results=GOSSIP,
        command=COMMAND,
        note="The γ of the theory is four orders of magnitude smaller than what works.",
    ),
    Claim(
        name="choco-bytes",
        methods=("choco_sgd",),
        source="Koloskova, Stich and Jaggi, Decentralized stochastic optimization and gossip "
        "algorithms with compressed communication, 2019, abstract",
        claim="CHOCO-SGD can reduce communication by at least two orders of magnitude.",
        setting=LINKS,
        judge=_choco_bytes,
        results=GOSSIP,
        command=COMMAND,
        note="One bit of 64 is the least that signs can have; workers that disagree keep all of "
        "them "
        "at the error of D-PSGD.",
    ),
    Claim(
        name="dcd-as-dpsgd",
        methods=("dcd",),
        source="Tang et al., Communication compression for decentralized training, 2018, abstract",
        claim="DCD-PSGD converges at the rate of centralised training in full precision, if the "
        "compression is precise enough.",
        setting=f"{LINKS} The step is that of the other methods.",
        judge=functools.partial(_as_dpsgd, method="DCD"),
        results=GOSSIP,
        command=COMMAND,
        note="It diverges with dense links too, so compression is not the reason: it mixes before "
        "it "
        "steps, which allows shorter steps only. Shorter steps were not measured.",
    ),
    Claim(
        name="deepsqueeze-as-dpsgd",
        methods=("deepsqueeze",),
        source="Tang et al., DeepSqueeze, 2019, abstract",
        claim="Error-compensated compression gives decentralised training the rate of training "
        "without compression, for biased codecs too.",
        setting=LINKS,
        judge=functools.partial(_as_dpsgd, method="DeepSqueeze"),
        results=GOSSIP,
        command=COMMAND,
        note="All of them stop where D-PSGD stops, because the workers disagree.",
    ),
    Claim(
        name="gradient-tracking-linear",
        methods=("gradient_tracking",),
        source="Liao et al., A compressed gradient tracking method for decentralized optimization "
        "with linear convergence, 2022, abstract",
        claim="Compressed gradient tracking converges linearly to the solution, although workers "
        "differ.",
        setting=LINKS,
        judge=_tracking,
        results=GOSSIP,
        command=COMMAND,
        note="It sends twice the bits of D-PSGD in a step.",
    ),
    Claim(
        name="noloco-bytes",
        methods=("noloco",),
        source="Kolehmainen et al., NoLoCo, 2025, abstract",
        claim="Rounds of local steps, after which a worker meets one other, need significantly "
        "less "
        "communication without a loss of convergence.",
        setting=f"{LINKS} NoLoCo exchanges after ten steps, the others after each.",
        judge=_without_all_reduce,
        results=GOSSIP,
        command=COMMAND,
        note="The paper compares with DiLoCo on language models.",
    ),
    Claim(
        name="dpsvrg-rate",
        methods=("dpsvrg", "dspg", "DPSVRG"),
        source="Li et al., Decentralized stochastic proximal gradient descent with variance "
        "reduction over time-varying networks, 2021, abstract",
        claim="DPSVRG converges at O(1/T), DSPG at O(1/√T).",
        setting="A lasso and a sparse logistic regression of eight workers, on a ring, a torus, "
        "and "
        "a ring in turns with pairs, 8,000 gradients of single rows.",
        judge=_dpsvrg,
        results=GOSSIP,
        command=COMMAND,
        note="DSPG is faster than its bound, because these losses are strongly convex near the "
        "solution. On the ring DPSVRG stops at the error of eight rounds of mixing.",
    ),
    Claim(
        name="qsvrg-linear",
        methods=("qsvrg",),
        source="Alistarh et al., QSGD, 2017, theorem on QSVRG",
        claim="Quantised variance-reduced SGD converges at a linear rate.",
        setting="Least squares with noise, eight workers that draw from the same 192 rows, qsgd of "
        "four bits, steps of 0.03 on single rows, snapshots after 60 steps, five seeds.",
        judge=_linear,
        run=_qsvrg,
        minutes=0.5,
        note="Workers that differ need a `Shift`: without it the codec's noise does not vanish.",
    ),
    Claim(
        name="noloco-diloco",
        methods=("noloco",),
        source="Kolehmainen et al., NoLoCo, 2025, abstract",
        claim="Without any all-reduce NoLoCo converges up to 4 % faster than DiLoCo.",
        setting="A byte model of 0.46 million parameters, four workers, 10 rounds of 15 steps of "
        "Adam, the better of two outer rates for each, the mean model of all workers, five seeds.",
        judge=_against_diloco,
        run=_noloco,
        minutes=4,
        note="The paper's models have 125 million parameters and more, and hundreds of workers.",
    ),
)
