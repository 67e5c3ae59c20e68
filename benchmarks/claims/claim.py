"""A published claim, how it is tried here, and what decides its verdict."""

import dataclasses
import datetime
import re
from collections.abc import Callable
from typing import Any, NamedTuple

HOLDS, PART, FAILS, CANNOT = VERDICTS = (
    "holds",
    "holds in part",
    "does not hold here",
    "cannot be tried here",
)


class Judged(NamedTuple):
    """What a judge makes of measured numbers.

    Attributes:
        words: our number in words.
        verdict: one of `VERDICTS`.
        margin: the decisive number over what the criterion asks for: above 1 where it is met, 2
            where twice as much is there as needed; the least of several. None for a criterion
            without a number.
    """

    words: str
    verdict: str
    margin: float | None = None


Judge = Callable[[dict[str, Any]], Judged | tuple[str, str]]
"""From measured numbers to what they say."""

PAIRED = "2026-11-26T20:40:00"
"""When the criteria of paired seeds were committed, before the trainings on MNIST."""

INSIDE = "2026-11-26T22:57:00"
"""When the criteria of claims inside their papers' assumptions were committed."""

RATES_FIXED = "2026-11-26T23:33:00"
"""When the criteria of federated rates were committed."""

NETWORKS_FIXED = "2026-11-27T00:08:00"
"""When the criterion of CD-Adam on networks was committed."""

LARGER_FIXED = "2026-11-27T02:42:00"
"""When the criteria of larger matrices, long warm-ups and trained starts were committed."""

ENDS_FIXED = "2026-11-27T02:52:00"
"""When the criteria of deeper networks, delays and side information were committed."""

SEEDS_FIXED = "2026-11-27T02:46:00"
"""When the criteria of traffic, memory and GenQSGD's bound were committed."""

DELAYS_FIXED = "2026-11-27T06:32:00"
"""When the criterion of gossip behind a delay was committed."""

PATCHES_FIXED = "2026-11-28T03:54:00"
"""When the criteria of patches of weights were committed."""

VISIBLE_FIXED = "2026-11-28T15:25:00"
"""When the criterion of visible changes between sites was committed."""

LONGEST = 120
"""Characters of a cell of the page's tables."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A row of docs/reproductions.md.

    A claim is measured by its own `run`, or it reads the committed `results` of another benchmark.
    Without both it cannot be tried here, and `note` says why.

    Attributes:
        name: in kebab-case; `make reproduce CLAIM=name` measures it.
        methods: names of the library (`jaxcomp.algorithms`, `jaxcomp`, `jaxcomp.federated`, …) and
            of `registry.SYSTEMS` that the row covers.
        source: authors, title, year, and the table, figure or theorem.
        claim: as published, in one sentence, with its number.
        setting: ours, in one sentence.
        criterion: what the numbers must be for "holds", in at most `LONGEST` characters: the rule
            of `judge` in words.
        fixed: when criterion and judge were committed, in UTC as "2026-11-26T20:00:00", if they
            were before the measurement; empty if they were written beside it.
        former: how the setting of the committed result differs, where `run` has another one that
            was not measured yet.
        judge: a pure function of the results' numbers: the key "numbers" of what `run` returns, or
            the whole file of `results`.
        run: measures and returns {"numbers": plain data}; shows its progress with rich.
        minutes: of `run` on two cores.
        results: a JSON file under benchmarks/results, or several with spaces between; then `judge`
            gets a dictionary of their contents by name.
        command: that made `results`; several, in their order, have line breaks between.
        note: reasons of the verdict, and deviations.
    """

    name: str
    methods: tuple[str, ...]
    source: str
    claim: str
    setting: str
    judge: Judge
    criterion: str = ""
    fixed: str = ""
    former: str = ""
    run: Callable[[], dict[str, Any]] | None = None
    minutes: float = 1
    results: str = ""
    command: str = ""
    note: str = ""

    def __post_init__(self):
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            raise ValueError(f"`name` must be in kebab-case, got {self.name!r}")
        if not self.methods:
            raise ValueError(f"`methods` of {self.name} must name a method, got none")
        if self.run and self.results:
            raise ValueError(f"{self.name} must have `run` or `results`, got both")
        if bool(self.results) != bool(self.command):
            raise ValueError(f"`command` of {self.name} must be that of `results`: give both")
        if len(self.criterion) > LONGEST:
            raise ValueError(
                f"`criterion` of {self.name} must have at most {LONGEST} characters, got "
                f"{len(self.criterion)}"
            )
        if self.fixed and self.former:
            raise ValueError(f"{self.name} must have `fixed` or `former`, got both")
        if self.fixed:
            datetime.datetime.fromisoformat(self.fixed)
        if not self.tried and not self.note:
            raise ValueError(f"`note` of {self.name} must say why it cannot be tried")

    @property
    def tried(self) -> bool:
        """Whether anything measures it."""
        return bool(self.run or self.results)

    @property
    def files(self) -> list[str]:
        """Its results, under benchmarks/results."""
        return self.results.split() or [f"reproductions/{self.name}.json"] * self.tried

    def verdict(self, found: dict[str, dict[str, Any]]) -> Judged:
        """Our number in words, the verdict and the margin, from its files' contents by name."""
        given = found if len(found) > 1 else next(iter(found.values()))
        found_: Any = self.judge(given if self.results else given["numbers"])
        judged = Judged(*found_)
        if judged.verdict not in VERDICTS:
            raise ValueError(
                f"`judge` of {self.name} must give one of {VERDICTS}, got {judged.verdict!r}"
            )
        return judged


def untried(numbers: dict[str, Any]) -> Judged:
    """The judge of a claim that cannot be tried here."""
    del numbers
    return Judged("–", CANNOT)


def decide(holds: bool, part: bool = False) -> str:
    """The verdict of a measured claim."""
    return HOLDS if holds else PART if part else FAILS
