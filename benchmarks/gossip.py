"""Decentralised methods: gradients, bytes and bits against error, on problems with known solutions.

    python benchmarks/gossip.py

`choco` mixes random models on a ring of 16 with several step sizes. `reduction` compares DPSVRG
with DSPG on a lasso and on a sparse logistic regression, over graphs that change and that do not,
at equal gradient evaluations and at equal bytes. `links` trains with every method through links of
four bits, signs and the largest tenth of the elements. `drift` is the distance between models
against the learning rate. Workers are simulated on one device, in float64. Tables, a picture and
`gossip.json` are in the `--out` folder; parts that are in it already are not run again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reporting
from reporting import Table
from rich.progress import track

import jaxcomp
from jaxcomp import algorithms, graphs
from jaxcomp.testing import problems
from jaxcomp.testing.mingling import mingle

AXIS = "workers"
CHOCO = "γ {mixing:.2f} | steps {steps} | variance {variance:.1e} | move of the mean {moved:.1e}"
REDUCTION = (
    "problem, graph {name} | slope of DSPG {dspg_slope:.2f} | slope of DPSVRG {dpsvrg_slope:.2f} | "
    "equal gradients {gradients:.0f} | DSPG {dspg_gradients:.1e} | DPSVRG {dpsvrg_gradients:.1e} | "
    "equal megabytes {megabytes:.1f} | DSPG {dspg_bytes:.1e} | DPSVRG {dpsvrg_bytes:.1e} | "
    "DPSVRG, one round a step {single:.1e}"
)
LINKS = (
    "method, link {name} | bits an element and step {bits:.2f} | steps {steps} | "
    "error {error:.1e} | distance of the models {apart:.1e}"
)
DRIFT = "η {rate:.4f} | distance of the models {apart:.2e} | distance / η² {constant:.2f}"


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
    """Random models on a ring of 16, the largest tenth of 50 elements."""
    start = np.random.default_rng(0).standard_normal((16, 50))
    still = lambda worker, step: (jnp.zeros_like, jnp.zeros_like)  # noqa: E731
    found = []
    for mixing in (0.05, 0.2, 0.34, 0.5):
        tx = algorithms.choco_sgd(CODECS["top 10 %"], AXIS, learning_rate=0.0, mixing=mixing)
        measure = lambda x: (spread(x), jnp.max(jnp.abs(x.mean(axis=0) - start.mean(axis=0))))  # noqa: E731
        (variance, moved), _ = mingle(
            tx, still, measure, workers=16, size=50, steps=steps, start=jnp.asarray(start)
        )
        last = {"variance": float(variance[-1]), "moved": float(moved[-1])}
        found.append({"mixing": mixing, "steps": steps, **last})
    return found


class Sparse(NamedTuple):
    """A sum of losses of rows, with a penalty on `Σ|x|`.

    Attributes:
        rows: `[workers, rows, size]`.
        targets: `[workers, rows]`.
        slope: from a row's prediction and target to the derivative of its loss.
        loss: the same, to the loss.
        penalty: the weight of `Σ|x|`.
        rate: a learning rate that suits single rows.
    """

    rows: Any
    targets: Any
    slope: Callable[[Any, Any], Any]
    loss: Callable[[Any, Any], Any]
    penalty: float
    rate: float

    def gradient(self, x: Any, rows: Any, targets: Any) -> Any:
        return rows.T @ self.slope(rows @ x, targets) / len(rows)

    def value(self, x: Any) -> Any:
        return self.loss(self.rows @ x, self.targets).mean() + self.penalty * jnp.sum(jnp.abs(x))

    def least(self, steps: int = 20_000) -> float:
        """The value at the solution, by proximal gradient descent with momentum."""
        rows, targets = self.rows.reshape(-1, self.rows.shape[-1]), self.targets.reshape(-1)
        smooth = float(jnp.linalg.eigvalsh(rows.T @ rows / len(rows))[-1])

        def step(carry: Any, _: Any) -> tuple[Any, None]:
            x, before, t = carry
            ahead = x + (t - 1) / (t + 2) * (x - before)
            z = ahead - self.gradient(ahead, rows, targets) / smooth
            new = jnp.sign(z) * jnp.maximum(jnp.abs(z) - self.penalty / smooth, 0)
            return (new, x, t + 1), None

        zero = jnp.zeros(rows.shape[1])
        (x, _, _), _ = jax.lax.scan(step, (zero, zero, 1.0), None, length=steps)
        return float(self.value(x))


def sparse(workers: int = 8, rows: int = 50, size: int = 20) -> dict[str, Sparse]:
    """A lasso and a sparse logistic regression, whose workers draw around points of their own."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((workers, rows, size))
    true = np.where(np.arange(size) < 5, rng.standard_normal(size), 0)
    own = true + 0.3 * rng.standard_normal((workers, 1, size))
    b = np.sum(a * own, axis=2) + 0.1 * rng.standard_normal((workers, rows))
    y = np.where(np.sum(a * own, axis=2) + rng.logistic(size=(workers, rows)) > 0, 1.0, -1.0)
    square = Sparse(
        jnp.asarray(a),
        jnp.asarray(b),
        lambda p, t: p - t,
        lambda p, t: (p - t) ** 2 / 2,
        penalty=0.05,
        rate=0.01,
    )
    logistic = Sparse(
        jnp.asarray(a),
        jnp.asarray(y),
        lambda p, t: -t * jax.nn.sigmoid(-t * p),
        lambda p, t: jnp.logaddexp(0.0, -t * p),
        penalty=0.02,
        rate=0.04,
    )
    return {"lasso": square, "logistic": logistic}


GRAPHS = {
    "ring": graphs.Ring(),
    "torus": graphs.Torus(2, 4),
    "ring, then pairs": graphs.Alternating((graphs.Ring(), graphs.OnePeer())),
}


def curve(tx: Any, problem: Sparse, steps: int, seed: int = 0) -> np.ndarray:
    """The mean over the workers of the loss of all, above its least value, after each step."""
    workers, rows, size = problem.rows.shape
    key, least = jax.random.key(seed), problem.least()

    def oracle(worker: Any, step: Any) -> Any:
        a, b = problem.rows[worker], problem.targets[worker]
        which = jax.random.randint(
            jax.random.fold_in(jax.random.fold_in(key, step), worker), (1,), 0, rows
        )
        batch = lambda x: problem.gradient(x, a[which], b[which])  # noqa: E731
        return batch, lambda x: problem.gradient(x, a, b)

    measure = lambda models: jax.vmap(problem.value)(models).mean() - least  # noqa: E731
    found, _ = mingle(tx, oracle, measure, workers=workers, size=size, steps=steps)
    return np.maximum(np.asarray(found), 1e-16)


def costs(
    steps: int, rows: int, degree: float, payload: int, lengths: Any = None, most: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of single rows, and the bytes that a worker has sent, after each step."""
    at = np.arange(steps)
    if lengths is None:
        return at + 1.0, (at + 1) * degree * payload
    position = np.asarray(lengths.position(at))
    gradients = np.cumsum(2 + rows * (position == 0))
    return gradients, np.cumsum(np.minimum(position + 1, most)) * degree * payload


def slope(cost: np.ndarray, gap: np.ndarray) -> float:
    """Of the logarithms, over the last nine tenths of the costs, above the floor of rounding."""
    kept = (cost >= cost[-1] / 10) & (gap > 1e-14)
    if kept.sum() < 10:
        kept = gap > 1e-14
    at = np.unique(np.geomspace(1, kept.sum(), 60).astype(int)) - 1
    return float(np.polyfit(np.log(cost[kept][at]), np.log(gap[kept][at]), 1)[0])


def reduction(steps: int = 20_000) -> dict[str, Any]:
    found = {}
    lengths, most, size = jaxcomp.gates.Growing(10, 1.5), 8, 20
    for (kind, problem), (graph_name, graph) in track(
        [(p, g) for p in sparse().items() for g in GRAPHS.items()], "reduction"
    ):
        workers, rows, _ = problem.rows.shape
        degree = graphs.degree(graph, workers)
        shared = {"regularizer": jaxcomp.optimizers.L1(problem.penalty), "graph": graph}
        tried = []
        for scale in (1.0, 5.0):
            rate = functools.partial(lambda a, t: a / jnp.sqrt(1.0 + t), scale * problem.rate)
            tx = algorithms.dspg(IDENTITY, AXIS, learning_rate=rate, **shared)
            tried.append(curve(tx, problem, steps))
        dspg = min(tried, key=lambda gap: np.mean(gap[-steps // 20 :]))
        make = functools.partial(
            algorithms.dpsvrg, IDENTITY, AXIS, learning_rate=problem.rate, **shared
        )
        dpsvrg, single = (curve(make(most=m), problem, steps) for m in (most, 1))
        plain = costs(steps, rows, degree, 8 * size)
        reduced = costs(steps, rows, degree, 8 * size, lengths, most)
        found[f"{kind}, {graph_name}"] = {
            "dspg": {"gap": dspg, "gradients": plain[0], "bytes": plain[1]},
            "dpsvrg": {"gap": dpsvrg, "gradients": reduced[0], "bytes": reduced[1]},
            "single": float(np.min(single)),
        }
    return found


def reduced_record(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """One row: the slopes over gradients, and both errors at the largest cost that both reached."""
    record: dict[str, Any] = {"name": name, "single": found["single"]}
    for cost in ("gradients", "bytes"):
        end = min(found[method][cost][-1] for method in ("dspg", "dpsvrg"))
        record["megabytes" if cost == "bytes" else cost] = end / (1e6 if cost == "bytes" else 1)
        for method in ("dspg", "dpsvrg"):
            at = np.searchsorted(found[method][cost], end, side="right")
            record[f"{method}_{cost}"] = float(np.mean(found[method]["gap"][max(at - 20, 0) : at]))
    for method in ("dspg", "dpsvrg"):
        record[f"{method}_slope"] = slope(found[method]["gradients"], found[method]["gap"])
    return record


def methods() -> dict[str, tuple[Callable[[Any], Any], int]]:
    """By name, a method of a codec's name, and how many messages it sends to a neighbour a step."""
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
        "DCD": (coded(algorithms.dcd, learning_rate=rate), 1),
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


def thinned(found: dict[str, Any]) -> dict[str, Any]:
    """Curves at moments that are evenly spaced on a log scale."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: short(one) for name, one in value.items()}
        if np.ndim(value) == 0:
            return float(value)
        value = np.asarray(value, float)
        return [float(f"{x:.4g}") for x in value[reporting.moments(len(value), 60)]]

    return short(found)


def picture(book: dict[str, Any], path: Any) -> None:
    figure, axes = reporting.panels(1, 3, (15, 4.6))
    colours = dict(zip(GRAPHS, ("#1b6ca8", "#d1495b", "#3c8d5a"), strict=True))
    for axis, cost, label in zip(
        axes[0],
        ("gradients", "bytes"),
        ("gradients of single rows, a worker", "bytes sent by a worker"),
        strict=False,
    ):
        for graph, colour in colours.items():
            both = book["reduction"]["curves"][f"lasso, {graph}"]
            for method, style in (("dspg", "--"), ("dpsvrg", "-")):
                one = both[method]
                axis.loglog(
                    one[cost], one["gap"], style, color=colour, label=f"{method.upper()}, {graph}"
                )
        axis.set(xlabel=label, ylabel="loss above its least value")
    axes[0][0].set_title("Lasso: variance reduction, equal gradients")
    axes[0][1].set_title("Lasso: variance reduction, equal bytes")
    axes[0][0].legend(fontsize=8)
    axis = axes[0][2]
    styles = dict(zip(("dense", *CODECS), ("-", "--", "-.", ":"), strict=True))
    shown = dict(
        zip(
            ("CHOCO-SGD", "DeepSqueeze", "gradient tracking"),
            ("#1b6ca8", "#d1495b", "#3c8d5a"),
            strict=True,
        )
    )
    for method, colour in shown.items():
        for codec, style in styles.items():
            one = book["links"][f"{method}, {codec}"]
            steps = reporting.moments(book["link_steps"], 60) + 1
            sent = 50 / 8 * one["bits"] * steps
            axis.loglog(sent, one["error"], style, color=colour)
    ends = (
        (2e5, 0.4, "CHOCO-SGD and\nDeepSqueeze: each link"),
        (5e5, 1e-3, "gradient\ntracking"),
    )
    for (x, y, text), method in zip(ends, ("DeepSqueeze", "gradient tracking"), strict=True):
        axis.text(x, y, text, color=shown[method], fontsize=8, ha="right" if y < 0.1 else "center")
    axis.set(
        xlabel="bytes sent by a worker",
        ylabel="error of the mean model",
        ylim=(1e-8, 10),
        title="Least squares, workers differ: links",
    )
    black = [
        axis.plot([], [], style, color="black", label=name)[0] for name, style in styles.items()
    ]
    axis.legend(handles=black, fontsize=8, loc="lower left")
    reporting.draw(figure, path)


def write(folder: Any, book: dict[str, Any], *, quiet: bool = False) -> None:
    parts: list[Any] = [f"{reporting.line(book['environment'])}."]
    parts.append(
        Table("CHOCO on a ring of 16, the largest tenth of the elements", CHOCO, book["choco"])
    )
    title = "DPSVRG against DSPG: loss above its least value, mean over the workers"
    parts.append(Table(title, REDUCTION, book["reduction"]["table"]))
    rows = [
        {"name": name, "bits": one["bits"], "error": one["error"][-1], "apart": one["apart"][-1]}
        | {"steps": book["link_steps"]}
        for name, one in book["links"].items()
    ]
    parts.append(Table("Least squares on a ring of 8, workers that differ", LINKS, rows))
    parts.append(Table("D-PSGD on a ring of 8 with constant rates", DRIFT, book["drift"]))
    reporting.sections(parts, folder / "gossip.md", quiet=quiet)


def main() -> None:
    chosen = reporting.options(
        __doc__,
        "out/gossip",
        steps=(20_000, "steps of DPSVRG and DSPG"),
        link_steps=(2_000, "steps through each link"),
    )
    jax.config.update("jax_enable_x64", True)
    path = chosen.out / "gossip.json"
    book = reporting.read(path) if path.exists() else {"environment": reporting.environment()}
    book["link_steps"] = chosen.link_steps

    def reduced() -> dict[str, Any]:
        found = reduction(chosen.steps)
        rows = [reduced_record(name, one) for name, one in found.items()]
        return {"curves": thinned(found), "table": rows}

    jobs: dict[str, Callable[[], Any]] = {
        "choco": choco,
        "drift": drift,
        "reduction": reduced,
        "links": lambda: thinned(links(chosen.link_steps)),
    }
    for name, job in jobs.items():
        if name not in book:
            book[name] = job()
            reporting.keep(path, book)
    write(chosen.out, book)
    picture(book, chosen.out / "gossip.png")


if __name__ == "__main__":
    main()
