"""The time of a round between sites: steps, messages over their links, and what Flower takes."""

import dataclasses

from jaxcomp import checks, tables
from jaxcomp.theory import units

TRIPS = 8
"""Answers that a site waits for in a round, one after another: fitted to rounds with Flower's node
over links of 0 to 150 ms; those with `jaxcomp_site.node` wait for no more."""

IDLE = 2.4
"""Seconds in which a round with `jaxcomp_site.node` waits: those of the smallest model in
`benchmarks/results/sites/sizes`."""

HANDLING = 4e-8
"""Seconds for each byte of the parameters in which the server and its sites encode, decode and
write checkpoints: fitted to the model of five million parameters there, on two cores."""


@dataclasses.dataclass(frozen=True)
class SitesPlan:
    """A forecast of rounds between sites.

    Attributes:
        steps: of a round.
        step: seconds of a step.
        up: bytes of a site's message.
        down: bytes of the server's message to a site.
        bandwidth: bytes a second of the link to a site.
        delay: seconds there and back.
        idle: seconds of a round in which nothing is sent or computed.
        trips: answers that a site waits for in a round, one after another.
        upload: bytes a second of the link from a site; None for those of the other direction.
        handling: seconds of a round in which parameters are encoded, decoded and written to disks.
    """

    steps: int
    step: float
    up: int
    down: int
    bandwidth: float
    delay: float
    idle: float = IDLE
    trips: float = TRIPS
    upload: float | None = None
    handling: float = 0.0

    def __post_init__(self):
        checks.integer("steps", self.steps, 1)
        checks.integer("up", self.up, 0)
        checks.integer("down", self.down, 0)
        checks.positive("bandwidth", self.bandwidth)
        if self.upload is not None:
            checks.positive("upload", self.upload)
        for name in ("step", "delay", "idle", "trips", "handling"):
            checks.number(name, getattr(self, name), 0.0)

    @property
    def training(self) -> float:
        """Seconds of a round's steps."""
        return self.steps * self.step

    @property
    def sending(self) -> float:
        """Seconds in which messages are on the link."""
        return self.sending_up + self.sending_down

    @property
    def sending_up(self) -> float:
        """Seconds in which a site's message is on the link."""
        return self.up / (self.upload or self.bandwidth)

    @property
    def sending_down(self) -> float:
        """Seconds in which the server's message is on the link."""
        return self.down / self.bandwidth

    @property
    def waiting(self) -> float:
        """Seconds in which answers are awaited, and Flower is idle."""
        return self.idle + self.trips * self.delay

    @property
    def seconds(self) -> float:
        """Seconds of a round."""
        return self.training + self.sending + self.waiting + self.handling

    @property
    def share(self) -> float:
        """The share of a round in which a site trains."""
        return self.training / self.seconds

    def steps_for(self, share: float) -> int:
        """The steps of a round with which a site trains for this share of it.

        Args:
            share: above 0, below 1.
        """
        checks.share("share", share)
        checks.decay("share", share)
        checks.positive("step", self.step)
        rest = self.sending + self.waiting + self.handling
        return max(1, round(rest * share / (1 - share) / self.step))

    def __str__(self) -> str:
        rows = [
            (f"{self.steps} steps", units.duration(self.training)),
            (f"{self.up:,} bytes up", units.duration(self.sending_up)),
            (f"{self.down:,} bytes down", units.duration(self.sending_down)),
            ("codecs, checkpoints", units.duration(self.handling)),
            ("waiting", units.duration(self.waiting)),
            ("a round", units.duration(self.seconds)),
        ]
        lines = [f"{name:<40} {took:>9}" for name, took in rows]
        text = f"A site trains for {self.share:.0%} of a round."
        if self.step:
            text += f" For 90 %, take rounds of {self.steps_for(0.9):,} steps."
        return "\n".join([*lines, text])

    def to_json(self) -> str:
        """All numbers."""
        more = ("seconds", "training", "sending", "waiting", "share")
        return tables.to_json({**vars(self), **tables.attributes(self, *more)})
