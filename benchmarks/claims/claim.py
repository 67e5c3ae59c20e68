"""A published claim, how it is tried here, and what decides its verdict."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

HOLDS, PART, UNDECIDED, FAILS, CANNOT = VERDICTS = (
    "holds",
    "holds in part",
    "undecided",
    "does not hold here",
    "cannot be tried here",
)

WHYS = {
    "premise": "a premise of the paper is absent here",
    "size": "our run is too small, too short or too noisy",
    "tuning": "our settings are not the best ones",
    "false": "the claim is false in our setting",
    "ours": "a part of the method is not built, or weak",
}
"""Why a claim is below "holds": one word of these for each."""


class Change(NamedTuple):
    """A criterion, program or setting that was replaced.

    Attributes:
        commit: the last one that had the former.
        verdict: of that commit, on the result that it has, or on the present one.
        words: the change, in a sentence or two.
    """

    commit: str
    verdict: str
    words: str


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
        fixed: a commit older than the measurement that has the criterion, the judge, the program
            and its settings, but for what `changed` says; empty if there is none.
        changed: what was replaced since `fixed`, or since the measurement.
        former: how the setting of the committed result differs, where `run` has another one that
            was not measured yet.
        why: the word of `WHYS` for a verdict below "holds"; empty above.
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
    why: str = ""
    fixed: str = ""
    changed: tuple[Change, ...] = ()
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
        if self.why and self.why not in WHYS:
            raise ValueError(
                f"`why` of {self.name} must be one of {', '.join(WHYS)}, got {self.why!r}"
            )
        if self.fixed and self.former:
            raise ValueError(f"{self.name} must have `fixed` or `former`, got both")
        for commit in (*[self.fixed] * bool(self.fixed), *(one.commit for one in self.changed)):
            if not re.fullmatch(r"[0-9a-f]{8}", commit):
                raise ValueError(
                    f"commits of {self.name} must have 8 hexadecimal digits, got {commit!r}"
                )
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


def decide(holds: bool, part: bool = False, undecided: bool = False) -> str:
    """The verdict of a measured claim: `undecided` if intervals contain their bounds."""
    return HOLDS if holds else PART if part else UNDECIDED if undecided else FAILS
