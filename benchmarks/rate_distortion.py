"""Compares the squared error of codecs with the bounds of information theory at their bits.

    python examples/byte_lm.py --codec dense --save-gradients
    python benchmarks/rate_distortion.py

Bits are those of the payload, scales and indices included, divided by the elements; the error is
`‖x̂ − x‖² / ‖x‖²`, the mean over some draws of the codec's noise. The inputs are a million numbers
of three laws, each as one leaf, and gradients of a transformer at three moments of its training,
each leaf of them that `compressed_mean` would compress.

A codec that aims at an unbiased result is held against `ω ≥ 1/(4^b − 1)`, the others against the
rate-distortion curve `4^−b`. Both hold on average for Gaussian input. EDEN and DRIVE are among the
first: they are unbiased on average over all rotations, and declared as neither class because a
single Hadamard rotation is not quite that for sparse input.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any

import gradients
import jax
import numpy as np
import reporting
from rate_distortion_plot import plot
from rich.progress import track

import jaxcomp
from jaxcomp import codecs
from jaxcomp.numerics import noise
from jaxcomp.theory import limits

SIZE = 2**20
MOMENTS = ("early", "middle", "late")
LAWS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "gaussian": lambda rng, size: rng.standard_normal(size),
    "laplace": lambda rng, size: rng.laplace(size=size),
    "heavy": lambda rng, size: rng.standard_normal(size) ** 3,
}
Tree = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A codec and its series: one recipe at several settings."""

    series: str
    family: str
    codec: Any
    setting: str = ""

    @property
    def name(self) -> str:
        return f"{self.series} {self.setting}".rstrip()

    @property
    def aims_unbiased(self) -> bool:
        """Whether it is unbiased, at least on average over all rotations."""
        return self.codec.unbiased or getattr(self.codec, "unbiased_on_average", False)

    @property
    def declared(self) -> str:
        if self.codec.unbiased:
            return "unbiased"
        return "contractive" if self.codec.contractive else "neither"


def series(
    name: str, family: str, make: Callable[..., Any], settings: Iterable[Any], **options: Any
) -> list[Entry]:
    """One recipe at several settings, its first argument."""
    make = functools.partial(make, **options)
    return [Entry(name, family, make(each), str(each)) for each in settings]


def shares(name: str, make: Callable[..., Any], *given: float) -> list[Entry]:
    return [Entry(name, "sparse", make(share), f"{100 * share:g} %") for share in given]


def following(codec: Any, capacity: float) -> codecs.Coded:
    """With a table that adapts to the sent symbols, and capacity for Gaussian input."""
    return codecs.Coded(codec=codec, capacity=capacity, memory=0.5)


def entries() -> list[Entry]:
    """Most recipes, many at several widths, two chains and a quantizer with a coder.

    Left out are `threshold`, `elias_qsgd`, `huffman_nuqsgd`, `int_sgd`, `thc`, `msc` and `Ballot`;
    the combinators `Contractive` and `Clipped`; undithered `ndsc` and `dsc`; and other variants.
    """
    midrise, subtractive = {"levels": "midrise"}, {"subtractive": True}
    few, more = (3, 4), (2, 3, 4, 8)
    even, powers, ternary = "even levels", "powers of two", "signs and ternary"
    dithering, signs = jaxcomp.natural_dithering, jaxcomp.sign()
    rotated, floats, composed, coded = "rotated", "float formats", "composed", "entropy coded"
    mx = ("mxfp4", "mxfp6", "mxfp6_e3m2", "mxfp8", "mxfp8_e5m2", "nvfp4")
    four = jaxcomp.qsgd_inf(bits=4, bucket_size=128)
    pair = (jaxcomp.top_k(fraction=0.01, bucket_size=512), jaxcomp.qsgd_inf(bits=3))
    return [
        *series("qsgd", even, jaxcomp.qsgd, more),
        *series("qsgd mid-rise", even, jaxcomp.qsgd, more, **midrise),
        *series("qsgd subtractive", even, jaxcomp.qsgd, more, **subtractive),
        *series("qsgd_inf", even, jaxcomp.qsgd_inf, more),
        *series("qsgd_inf mid-rise", even, jaxcomp.qsgd_inf, more, **midrise),
        *series("qsgd_inf subtractive", even, jaxcomp.qsgd_inf, more, **subtractive),
        *series("blockwise", even, jaxcomp.blockwise, more),
        *series("averaged_ternary", even, jaxcomp.averaged_ternary, [8]),
        *series("nuqsgd", powers, jaxcomp.nuqsgd, few),
        *series("natural_dithering", powers, dithering, few),
        *series("natural_dithering, natural norm", powers, dithering, few, natural_norm=True),
        *series("natural", powers, jaxcomp.natural, (8, 9)),
        *series("alq", "adaptive levels", jaxcomp.alq, few),
        *series("amq", "adaptive levels", jaxcomp.amq, few),
        Entry("terngrad", ternary, jaxcomp.terngrad()),
        Entry("terngrad, not clipped", ternary, jaxcomp.terngrad(clip=None)),
        *series("threshold_ternary", ternary, jaxcomp.threshold_ternary, ("optimal", "heuristic")),
        Entry("sign", ternary, signs),
        *series("eden", rotated, jaxcomp.eden, (0.25, 0.5, 1, 1.5, 2, 2.5, 3, 4)),
        *series("eden, minimum error", rotated, jaxcomp.eden, (1, 2, 3, 4), scale="minimum_error"),
        Entry("drive", rotated, jaxcomp.drive()),
        *series("ndsc", rotated, jaxcomp.ndsc, (0.5, 1, 2, 3, 4)),
        *series("dsc", rotated, jaxcomp.dsc, (1.5, 2, 3, 4)),
        *series("rotated_uniform", rotated, jaxcomp.rotated_uniform, (2, 3, 4)),
        *series("ecsq", coded, jaxcomp.ecsq, (0.5, 1, 2, 3, 4), scale="unbiased", rotations=2),
        *series("ecsq, minimum error", coded, jaxcomp.ecsq, (0.5, 1, 2, 3, 4)),
        Entry("qsgd 4, coded", coded, following(jaxcomp.qsgd(), 1.3)),
        *shares("random_k", jaxcomp.random_k, 0.1, 0.01),
        *shares("top_k", jaxcomp.top_k, 0.1, 0.01, 0.001),
        *shares("top_k, 4-bit values", lambda share: jaxcomp.top_k(share, values=four), 0.01),
        *shares("sidco", jaxcomp.sidco, 0.01, 0.001),
        *shares("dgc", jaxcomp.dgc, 0.001),
        *shares("fastsgd", jaxcomp.fastsgd, 0.01),
        Entry("demo", "sparse", jaxcomp.demo()),
        *(Entry(name, floats, jaxcomp.mx(name)) for name in mx),
        Entry("mxfp4, unbiased", floats, jaxcomp.mx("mxfp4", rule="ceil", rounding="stochastic")),
        *series("cast", floats, jaxcomp.cast, ("bfloat16", "float8_e4m3fn", "float8_e5m2")),
        Entry("sign of sign", composed, codecs.Chained(codecs=(signs, signs))),
        Entry("top_k 1 %, then qsgd_inf 3", composed, codecs.Chained(codecs=pair)),
    ]


def draw(size: int) -> dict[str, Tree]:
    """Each law as a tree of one leaf."""
    rng = np.random.default_rng(0)
    return {law: {"x": make(rng, size).astype(np.float32)} for law, make in LAWS.items()}


def real(folder: pathlib.Path) -> dict[str, Tree]:
    """The gradients in a folder, without the leaves that are sent dense."""
    policy = jaxcomp.Policy(jaxcomp.sign())
    return {
        moment: {
            name: leaf
            for name, leaf in gradients.load(folder / f"{moment}.npz").items()
            if policy.choose(name, leaf.shape)[0]
        }
        for moment in MOMENTS
    }


def sender(codec: Any) -> Callable[[Tree], Iterator[Any]]:
    """A function from a tree to the decoded trees of successive steps."""
    if not codec.facts.sided:
        send = jax.jit(functools.partial(jaxcomp.roundtrip, codec))
        return lambda tree: (send(noise.raw(seed), tree) for seed in itertools.count())
    # Workers agree on levels that follow the gradients. Here there is one worker.
    link = jaxcomp.Link(jaxcomp.Policy(codec, min_size=0, min_ndim=0))
    mean = jaxcomp.compressed_mean(link, "workers", guard=False)
    begin = jax.jit(jax.vmap(mean.init, axis_name="workers"))
    step = jax.jit(jax.vmap(mean.update, axis_name="workers"))

    def steps(tree: Tree) -> Iterator[Any]:
        one = jax.tree.map(lambda leaf: leaf[None], tree)
        state = begin(one)
        _, state = step(one, state)  # The levels are set in the second step.
        while True:
            arrived, state = step(one, state)
            yield jax.tree.map(lambda leaf: leaf[0], arrived)

    return steps


def error(arrived: Any, tree: Tree) -> float:
    """Relative squared error over the whole tree, in float64."""
    lost = sum(np.sum((np.float64(arrived[name]) - leaf) ** 2) for name, leaf in tree.items())
    return float(lost / sum(np.sum(np.float64(leaf) ** 2) for leaf in tree.values()))


def measure(entry: Entry, inputs: dict[str, Tree], draws: int) -> dict[str, Any]:
    arrive = sender(entry.codec)
    bits, errors, counted = {}, {}, {}
    for name, tree in inputs.items():
        shapes = tuple(leaf.shape for leaf in tree.values())
        if shapes not in counted:
            size = sum(leaf.size for leaf in tree.values())
            counted[shapes] = 8 * jaxcomp.wire_bytes(entry.codec, tree) / size
        bits[name] = counted[shapes]
        found = itertools.islice(arrive(tree), draws)
        errors[name] = float(np.mean([error(arrived, tree) for arrived in found]))
    bound = limits.unbiased_bound if entry.aims_unbiased else limits.rate_distortion
    return {
        "series": entry.series,
        "setting": entry.setting,
        "family": entry.family,
        "class": entry.declared,
        "aims_unbiased": entry.aims_unbiased,
        "bits": bits,
        "error": errors,
        "over_bound": errors["gaussian"] / float(bound(bits["gaussian"])),
    }


def eden_widths(rows: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The factor of EDEN over the unbiased bound, at its width and at the bits that it sends."""
    found = {}
    for bits in (1, 2, 3, 4):
        row = rows.get(f"eden {bits}")
        if row:
            omega = row["error"]["gaussian"]
            found[str(bits)] = {
                "error": omega,
                "theory": limits.eden(bits),
                "over_bound_at_width": omega / float(limits.unbiased_bound(bits)),
                "over_bound_at_payload": row["over_bound"],
            }
    return found


COLUMNS = (
    "codec {name} | class {class} | bits {bits[gaussian]:.3f} | "
    "error, Gaussian {error[gaussian]:.3g} | times 1/(4^b − 1) {unbiased} | times 4^−b {biased} | "
    "Laplace {error[laplace]:.3g} | normal³ {error[heavy]:.3g} | "
    "gradients early / middle / late {trained} | bits, gradients {bits[early]:.3f}"
)


def record(name: str, row: dict[str, Any]) -> dict[str, Any]:
    times, errors = row["over_bound"], row["error"]
    over = f"{times:.2f}" if times < 100 else f"{times:.0f}"
    trained = " / ".join(f"{errors[moment]:.3g}" for moment in MOMENTS if moment in errors)
    kind = "unbiased" if row["aims_unbiased"] else "biased"
    return {**row, "name": name, kind: over, "trained": trained}


def inputs_of(size: int, folder: pathlib.Path) -> dict[str, Tree]:
    try:
        return draw(size) | real(folder)
    except FileNotFoundError:
        print(
            f"no gradients in {folder}, and left out: make them by "
            "`python examples/byte_lm.py --codec dense --save-gradients`"
        )
        return draw(size)


def main() -> None:
    every, folder = entries(), pathlib.Path
    options = reporting.options(
        __doc__,
        "out/rate_distortion",
        size=(SIZE, "numbers drawn from each law"),
        draws=(4, "of a codec's noise, to average"),
        codec=({entry.series: entry for entry in every}, "some of them, by recipe"),
        gradients=(folder("out/byte_lm/gradients"), "folder of real ones"),
        update=(False, "keep rows that --out has of codecs not measured now"),
    )
    chosen = [entry for entry in every if entry.series in options.codec]
    inputs = inputs_of(options.size, options.gradients)
    with futures.ThreadPoolExecutor(2) as pool:  # Most of the time is compilation.
        found = pool.map(lambda entry: measure(entry, inputs, options.draws), chosen)
        found = track(found, f"{len(inputs)} inputs", len(chosen), transient=True)
        rows = {entry.name: row for entry, row in zip(chosen, found, strict=True)}
    path = options.out / "codecs.md"
    if options.update:
        before = reporting.read(path.with_suffix(".json"))
        if (before["size"], before["draws"]) != (options.size, options.draws):
            raise SystemExit("--update needs the sizes and draws of the results in --out")
        rows = {entry.name: (before["codecs"] | rows)[entry.name] for entry in every}
    results = {"size": options.size, "draws": options.draws, "codecs": rows}
    results["eden"] = eden_widths(rows)
    title = f"Relative squared error at so many bits an element, {options.size:,} numbers a law"
    records = [record(name, row) for name, row in rows.items()]
    reporting.show(reporting.Table(title, COLUMNS, records), results, path)
    for bits, row in results["eden"].items():
        print(
            f"eden {bits}: error {row['error']:.4f} (theory {row['theory']:.4f}), "
            f"{row['over_bound_at_width']:.2f} times the unbiased bound at {bits} bits, "
            f"{row['over_bound_at_payload']:.2f} times that at the payload's"
        )
    plot(rows, options.out / "rate_distortion.png")
    if any("middle" in row["error"] for row in rows.values()):
        plot(rows, options.out / "rate_distortion_gradients.png", "middle")


if __name__ == "__main__":
    main()
