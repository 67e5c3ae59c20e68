"""Runs dieharder: the chosen tests, a pipe of words, and a verdict from the p-values.

Left out are tests 5, 6 and 7 (OPSO, OQSO, DNA), which `dieharder -l` itself calls suspect, and 14
(sums), which it says not to use.
"""

import dataclasses
import shutil
import subprocess
import threading
from collections.abc import Iterator
from typing import IO

import numpy as np
from scipy import stats

WEAK, FAILED = 0.005, 1e-6
"""dieharder's thresholds."""
ATTEMPTS = 3
"""How often a test must be weak to count."""
_EVERY_P = "65536"  # A number, since dieharder 3.31 does not accept the name that it lists.


@dataclasses.dataclass(frozen=True)
class Test:
    """One call of dieharder; a repetition draws `again` times as many p-values."""

    number: int
    samples: int = 100
    ntuple: int | None = None
    again: int = 2

    def command(self, attempt: int) -> list[str]:
        samples = self.samples * (self.again if attempt else 1)
        command = ["dieharder", "-g", "200", "-d", str(self.number), "-p", str(samples), "-c", ";"]
        command += ["-D", "test_name", "-D", "ntuple", "-D", _EVERY_P]
        return command if self.ntuple is None else [*command, "-n", str(self.ntuple)]


TESTS = (
    *(Test(number) for number in (0, 3, 4, 8, 9, 10, 11, 12, 15, 16, 100, 102)),
    *(Test(number, 50) for number in (1, 13, 101)),
    Test(2, 25),
    Test(17, 10),
    *(Test(200, 50, bits) for bits in (1, 2, 4, 8)),
    *(Test(201, 200, dimensions) for dimensions in (2, 5)),
    *(Test(202, 100, length) for length in (2, 5)),
    *(Test(203, 25, lag) for lag in (0, 1, 2, 3, 7, 31)),
    Test(204, 1000),
    *(Test(number, 1, again=10) for number in (205, 206, 207, 208, 209)),
)
"""With fewer p-values than the usual 100 where they are slow: a stream takes two minutes."""


@dataclasses.dataclass
class Result:
    """A test's p-value, followed by those of the repetitions."""

    test: str
    pvalues: list[float]

    @property
    def assessment(self) -> str:
        found = [assess(p) for p in self.pvalues]
        if "FAILED" in found:
            return "FAILED"
        return "PASSED" if "PASSED" in found else "WEAK"

    def __str__(self) -> str:
        if assess(self.pvalues[0]) == self.assessment == "PASSED":
            return f"{self.pvalues[0]:.4f}"
        shown = " → ".join(f"{p:.4f}" if 5e-5 < p < 1 - 5e-5 else f"{p:.8f}" for p in self.pvalues)
        return shown if self.assessment == "PASSED" else f"**{shown} {self.assessment}**"


def assess(p: float) -> str:
    """The verdict by dieharder's thresholds. Both tails count, since p-values should be uniform."""
    tail = min(p, 1 - p)
    return "FAILED" if tail < FAILED else "WEAK" if tail < WEAK else "PASSED"


@dataclasses.dataclass
class Feed:
    """Blocks for a pipe, and the number of written words."""

    blocks: Iterator[np.ndarray]
    words: int = 0

    def into(self, pipe: IO[bytes]) -> None:
        try:
            for block in self.blocks:
                pipe.write(block.data)
                self.words += block.nbytes // 4
        except BrokenPipeError:  # The reader has closed the pipe.
            pass


def run(test: Test, feed: Feed, attempt: int, seconds: float) -> list[Result]:
    """The result of a test on the next words; nothing if it takes too long."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        test.command(attempt), stdin=pipe, stdout=pipe, bufsize=0, pipesize=2**20
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            feed.into(process.stdin)
            report = process.stdout.read().decode()
        finally:
            timer.cancel()
    return [] if process.returncode else parse(report)


def parse(report: str) -> list[Result]:
    samples: dict[str, list[float]] = {}
    values: list[float] = []
    for line in report.splitlines():
        fields = [field.strip() for field in line.split(";")]
        if line.startswith(";"):
            values.append(float(fields[1]))
        elif len(fields) == 2:
            name = fields[0] if fields[1] == "0" else " ".join(fields)
            values = samples.setdefault(f"{name} second" if name in samples else name, [])
    return [Result(name, [uniformity(values)]) for name, values in samples.items()]


def uniformity(samples: list[float]) -> float:
    """The p-value of p-values: exact Kolmogorov-Smirnov, or the value itself if it is alone."""
    return samples[0] if len(samples) == 1 else float(stats.kstest(samples, "uniform").pvalue)


def version() -> str | None:
    """None if dieharder is not installed."""
    if shutil.which("dieharder") is None:
        return None
    listed = subprocess.run(["dieharder", "-l"], capture_output=True, text=True, check=False)
    _, found, after = listed.stdout.partition("version ")
    return after.split()[0] if found else "unknown"
