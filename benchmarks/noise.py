"""Tests with dieharder whether the noise is random along every number that it depends on.

    python benchmarks/noise.py --minutes 50 --out benchmarks/results/noise

Noise is a hash of (key, step, batch, worker, bucket, position), and a hash can be fine along one of
these and poor along another. So each stream varies one of them and holds the others: `position`
(512 elements of a bucket, then the next bucket), `leaf` (the 2²⁴ elements of one bucket, then the
next), `bucket`, `step`, `batch`, `worker` (the same element every time), and `key` (the same
element for 1,024 seeds in a row, then the next). Each is drawn twice: as whole words (`noise.at`),
and as the 20 bits of dither that codecs round with (`noise.below`), packed without gaps, eight in
five words: exactly the bits that codecs use reach the tests.

dieharder reads the words from a pipe without end, so nothing is read twice. What is weak is drawn
again under another key, with more p-values; only what is weak every time counts. What fails counts
at once. Some streams are controls that must fail, or the tests could not have found anything: the
hash with one of its two rounds, the lowest bits of its last product, of which the dither is the
upper ones, and seeds 0, 1, 2, ... that nothing mixed. One is a reference that must pass: numpy's
Philox.
"""

import dataclasses
import itertools
import pathlib
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import dieharder
import jax
import jax.numpy as jnp
import numpy as np
import reporting
from dieharder import ATTEMPTS, FAILED, TESTS, WEAK, Feed, Result, Test, assess
from rich.console import Console
from rich.progress import Progress

from jaxcomp.layout import batches as batches_
from jaxcomp.numerics import noise
from jaxcomp.quantize.levels import FRACTION
from jaxcomp.types import Array

WORDS = 2**20
SIZE = 512
LEAF = 2**24
MANY = 2**16
NEIGHBOURS = 2**10
ENOUGH = 3
LIMIT = 300.0
ZERO = jnp.uint32(0)


class Place(NamedTuple):
    """Seeds of buckets and positions in them; their broadcast shape, flattened, is a stream."""

    high: Array
    low: Array
    position: Array


Cut = Callable[[Array, Array], Place]
"""(key, number of the block) → the next `WORDS` places of a stream."""
Draw = Callable[[Array, Array, Array], Array]
"""What is drawn at a place."""


def own_key(key: Array, step: Any = 0, batch: Any = 0, worker: Any = 0) -> Array:
    """The key of a worker's private noise, as `compressed_mean` derives it."""
    return batches_.batch_key(noise.fold(key, step), batch, worker).own


def along_positions(key: Array, block: Array) -> Place:
    buckets = WORDS // SIZE
    high, low = noise.seeds(own_key(key), block * buckets, buckets)
    return Place(high[:, None], low[:, None], jnp.arange(SIZE, dtype=jnp.uint32)[None])


def along_leaves(key: Array, block: Array) -> Place:
    blocks = LEAF // WORDS
    high, low = noise.seeds(own_key(key), block // blocks, 1)
    return Place(high, low, block % blocks * WORDS + jnp.arange(WORDS, dtype=jnp.uint32))


def along_buckets(key: Array, block: Array) -> Place:
    high, low = noise.seeds(own_key(key), block * WORDS, WORDS)
    return Place(high, low, block // (2**32 // WORDS))  # All bucket numbers, then the next element.


def along_keys(key: Array, block: Array) -> Place:
    """Seeds that are close together, element after element."""
    buckets = WORDS // (SIZE * NEIGHBOURS)
    lows = key[1] + jnp.arange(NEIGHBOURS, dtype=jnp.uint32)
    keys = jnp.stack([jnp.broadcast_to(key[0], lows.shape), lows], 1)
    high, low = jax.vmap(lambda k: noise.seeds(own_key(k), block * buckets, buckets))(keys)
    position = jnp.arange(SIZE, dtype=jnp.uint32)[None, :, None]
    return Place(high.T[:, None, :], low.T[:, None, :], position)


def folded(key: Array, position: Array, **numbers: Array) -> Place:
    """One element under `WORDS` keys that differ in the numbers folded into them."""

    def seeds(numbers: dict[str, Array]) -> tuple[Array, Array]:
        return noise.seeds(own_key(key, **numbers), ZERO, 1)

    high, low = jax.vmap(seeds)(numbers)
    return Place(high[:, 0], low[:, 0], position)


def along_steps(key: Array, block: Array) -> Place:
    blocks = 2**31 // WORDS  # Steps are counted in int32.
    step = block % blocks * WORDS + jnp.arange(WORDS, dtype=jnp.uint32)
    return folded(key, block // blocks, step=step.astype(jnp.int32))


def along_batches(key: Array, block: Array) -> Place:
    index = jnp.arange(WORDS, dtype=jnp.uint32)
    return folded(key, ZERO, step=block * (WORDS // MANY) + index // MANY, batch=index % MANY)


def along_workers(key: Array, block: Array) -> Place:
    index = jnp.arange(WORDS, dtype=jnp.uint32)
    return folded(key, ZERO, step=block * (WORDS // MANY) + index // MANY, worker=index % MANY)


def unmixed_keys(key: Array, block: Array) -> Place:
    """Unmixed seeds: h(position + seed), the same numbers shifted by one."""
    elements = WORDS // NEIGHBOURS
    position = block * elements + jnp.arange(elements, dtype=jnp.uint32)
    return Place(key[1] + jnp.arange(NEIGHBOURS, dtype=jnp.uint32)[None], ZERO, position[:, None])


def dither(high: Array, low: Array, position: Array) -> Array:
    return dense(noise.below(FRACTION, high, low, position).reshape(-1), FRACTION)


def one_round(high: Array, low: Array, position: Array) -> Array:
    """`noise.at` without its second round."""
    h = position + high
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D) ^ low
    return h ^ (h >> 16)


def low_bits(high: Array, low: Array, position: Array) -> Array:
    """The lowest bits of the last product; the dither uses its upper ones."""
    word = noise.at(high, low, position)
    product = word ^ (word >> 16)
    return dense((product & (2**FRACTION - 1)).reshape(-1), FRACTION)


def dense(values: Array, bits: int) -> Array:
    """Values of `bits` bits as a stream of bits: 32 of them in `bits` words."""
    together = 32
    values = values.astype(jnp.uint32).reshape(-1, together)
    words = [jnp.zeros(values.shape[:1], jnp.uint32)] * bits
    for i in range(together):
        word, shift = divmod(i * bits, 32)
        words[word] |= values[:, i] << shift
        if shift + bits > 32:
            words[word + 1] |= values[:, i] >> (32 - shift)
    return jnp.stack(words, 1)


@dataclasses.dataclass(frozen=True)
class Stream:
    """A cut through the noise and what is drawn there; `good` is what the tests should say."""

    cut: Cut | None
    draw: Draw = noise.at
    good: bool = True

    def blocks(self, seed: int) -> Iterator[np.ndarray]:
        """Raw words without end. The next block is computed while one is read."""
        if self.cut is None:
            bits = np.random.Philox(seed)
            yield from (bits.random_raw(WORDS // 2) for _ in itertools.count())
        key, block = noise.raw(seed), jax.jit(self.block)
        ahead = block(key, ZERO)
        for number in itertools.count(1):
            now, ahead = ahead, block(key, jnp.uint32(number))
            yield np.asarray(now)

    def block(self, key: Array, number: Array) -> Array:
        assert self.cut is not None
        return self.draw(*self.cut(key, number)).reshape(-1)


CUTS = {
    "position": along_positions,
    "leaf": along_leaves,
    "bucket": along_buckets,
    "step": along_steps,
    "batch": along_batches,
    "worker": along_workers,
    "key": along_keys,
}
OTHERS = {
    "reference": Stream(None),
    "control-one-round": Stream(along_leaves, one_round, good=False),
    "control-low-bits": Stream(along_leaves, low_bits, good=False),
    "control-seeds": Stream(unmixed_keys, good=False),
}
WHOLE = {f"{name}-word": Stream(cut) for name, cut in CUTS.items()}
DITHER = {f"{name}-dither": Stream(cut, dither) for name, cut in CUTS.items()}
STREAMS = OTHERS | WHOLE | DITHER


class Outcome(NamedTuple):
    """The results on a stream, the number of tests that were not run, and the words read."""

    results: list[Result]
    missing: int
    words: int
    seconds: float

    @property
    def first_weak(self) -> int:
        return sum(assess(result.pvalues[0]) != "PASSED" for result in self.results)

    def count(self, assessment: str) -> int:
        return sum(result.assessment == assessment for result in self.results)

    def verdict(self, good: bool) -> str:
        if not good:
            return "fails, as it must" if self.count("FAILED") else "DOES NOT FAIL"
        found = [word for word in ("FAILED", "WEAK") if self.count(word)]
        return found[0] if found else "incomplete" if self.missing else "passed"


def examine(stream: Stream, deadline: float, tell: Callable[[Test], None]) -> Outcome:
    """All tests on a stream; on a control, only until it fails."""
    start, results, missing = time.monotonic(), [], 0
    feeds = [Feed(stream.blocks(attempt * MANY)) for attempt in range(ATTEMPTS)]
    for test in TESTS:
        tell(test)
        found = dieharder.run(test, feeds[0], 0, left(deadline))
        missing += not found
        if stream.good:
            repeat(test, found, feeds, deadline)
        results += found
        if not stream.good and sum(r.assessment == "FAILED" for r in results) >= ENOUGH:
            break
    words = sum(feed.words for feed in feeds)
    return Outcome(results, missing, words, time.monotonic() - start)


def repeat(test: Test, found: list[Result], feeds: list[Feed], deadline: float) -> None:
    """Repeats a test under other keys while any of its p-values is weak each time."""
    for attempt in range(1, ATTEMPTS):
        if all(result.assessment == "PASSED" for result in found):
            return
        again = dieharder.run(test, feeds[attempt], attempt, left(deadline))
        for result, more in zip(found, again, strict=bool(again)):
            result.pvalues += more.pvalues


def left(deadline: float) -> float:
    """Seconds that a call of dieharder may take."""
    return max(min(LIMIT, deadline - time.monotonic()), 0.0)


def examine_all(names: list[str], seconds: float) -> dict[str, Outcome]:
    """Each in at most twice its share of the time that is left."""
    outcomes: dict[str, Outcome] = {}
    end = time.monotonic() + seconds
    with Progress(console=Console(), transient=True) as progress:
        task = progress.add_task("", total=len(names) * len(TESTS))
        for number, name in enumerate(names):

            def tell(test: Test, name: str = name) -> None:
                progress.update(task, advance=1, description=f"{name}, test {test.number}")

            share = (end - time.monotonic()) / (len(names) - number)
            deadline = min(end, time.monotonic() + 2 * share)
            outcome = outcomes[name] = examine(STREAMS[name], deadline, tell)
            progress.update(task, completed=(number + 1) * len(TESTS))
            verdict = outcome.verdict(STREAMS[name].good)
            progress.console.print(f"{name}: {verdict} ({outcome.seconds:.0f} s)")
    return outcomes


COLUMNS = (
    "stream {name} | p-values {pvalues} | weak {weak} | still weak {still} | failed {failed} | "
    "not run {missing} | 10⁹ words {words:.1f} | verdict {verdict}"
)


def record(name: str, found: Outcome) -> dict[str, Any]:
    return {
        "name": name,
        "pvalues": len(found.results),
        "weak": found.first_weak,
        "still": found.count("WEAK"),
        "failed": found.count("FAILED"),
        "missing": found.missing,
        "words": found.words / 1e9,
        "verdict": found.verdict(STREAMS[name].good),
    }


def arithmetic(outcomes: dict[str, Outcome]) -> str:
    """The numbers expected by chance, with the numbers found."""
    ours = [n for n in outcomes if n not in OTHERS]
    first = [result.pvalues[0] for name in ours for result in outcomes[name].results]
    if not first:
        return ""
    total, weak = len(first), sum(assess(p) != "PASSED" for p in first)
    smallest = 2 * min(min(p, 1 - p) for p in first)
    found = f"""The streams of the library gave {total} p-values. Of so many uniform ones,
    {2 * WEAK * total:.1f} are below {WEAK} or above {1 - WEAK} by chance; here it is {weak}. By
    chance, {total * (2 * WEAK) ** ATTEMPTS:.1g} of them are so {ATTEMPTS} times in a row, each time
    under another key, and {2 * FAILED * total:.1g} fail (below {FAILED:.0e}, or as near to 1). The
    most extreme has the two-sided value {smallest:.2g}; times their number (Bonferroni) that is
    {total * smallest:.2g}, and would be evidence if it were far below 1. Not all are independent:
    the thirty of `sts_serial` look at the same bits, and tend to be weak together."""
    method = """A p-value here is that of an exact Kolmogorov-Smirnov test of a test's p-values.
    dieharder's own is too near to 1, because it measures the distance to i/(n+1) on one side of
    each step only. In the tables below, → leads from a weak p-value to those of the repetitions.
    A control stops at its third failure."""
    filled = (textwrap.fill(" ".join(part.split()), 100) for part in (found, method))
    return "\n" + "\n\n".join(filled) + "\n"


def matrix(title: str, outcomes: dict[str, Outcome]) -> str:
    """A section in Markdown: a row for each test, a column for each stream."""
    rows: dict[str, dict[str, str]] = {}
    for name, found in outcomes.items():
        for result in found.results:
            rows.setdefault(result.test, {"test": result.test})[name] = str(result)
    columns = " | ".join(f"{name} {{{name}}}" for name in ("test", *outcomes))
    return f"\n## {title}\n\n{reporting.Table(title, columns, [*rows.values()]).markdown()}\n"


def report(outcomes: dict[str, Outcome], version: str, path: pathlib.Path) -> None:
    streams = {
        name: {
            "verdict": found.verdict(STREAMS[name].good),
            "words": found.words,
            "not run": found.missing,
            "failed": [r.test for r in found.results if r.assessment == "FAILED"],
            "still weak": [r.test for r in found.results if r.assessment == "WEAK"],
            "p-values": {r.test: [round(p, 8) for p in r.pvalues] for r in found.results},
        }
        for name, found in outcomes.items()
    }
    parts = [arithmetic(outcomes)]
    for title, names in {"Whole words": WHOLE, "Dither": DITHER, "Others": OTHERS}.items():
        chosen = {name: found for name, found in outcomes.items() if name in names}
        parts += [matrix(title, chosen)] if chosen else []
    title = f"The noise under dieharder {version}"
    table = reporting.Table(title, COLUMNS, [record(*pair) for pair in outcomes.items()])
    results = {"dieharder": version, "streams": streams}
    reporting.show(table, results, path, after="".join(parts))


def main() -> None:
    options = reporting.options(
        __doc__,
        "out/noise",
        minutes=(50.0, "for all streams together"),
        stream=(STREAMS, "some of them"),
    )
    version = dieharder.version()
    if version is None:
        sys.exit("dieharder is not installed; on Debian or Ubuntu: sudo apt-get install dieharder")
    outcomes = examine_all(options.stream, 60 * options.minutes)
    report(outcomes, version, options.out / "dieharder.md")
    verdicts = {name: found.verdict(STREAMS[name].good) for name, found in outcomes.items()}
    good = ("passed", "fails, as it must")
    bad = [name for name, verdict in verdicts.items() if verdict not in good]
    if bad:
        sys.exit(f"not as it should be: {', '.join(bad)}")


if __name__ == "__main__":
    main()
