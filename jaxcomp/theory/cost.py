"""The cost of a mean: the α–β model of a link, and the work of codecs.

`T = rounds · α + bytes / β + work`: a collective over `n` devices takes `rounds` sequential
messages of `α` seconds each, sends `bytes` from each device at `β` bytes per second, and takes
`work` seconds of encoding and decoding.
"""

import dataclasses
import math

from jaxcomp import checks


@dataclasses.dataclass(frozen=True)
class Network:
    """The link of a worker, or of a host whose devices share it.

    Args:
        bandwidth: β, the bytes per second that the link can send: 1 Gbit/s is 1.25e8.
        latency: α, the additional seconds for each message.

    Raises:
        ValueError: for a bandwidth that is not positive, or a negative latency.

    Example:
        >>> ethernet = Network(bandwidth=1.25e9, latency=50e-6)
        >>> print(round(ring(100e6, 16).seconds(ethernet), 4))  # 25M float32, 16 workers.
        0.1515
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self):
        checks.positive("bandwidth", self.bandwidth)
        checks.number("latency", self.latency, 0.0)


@dataclasses.dataclass(frozen=True)
class Work:
    """Seconds an element that a codec with its feedback takes on one device.

    Args:
        encode: the time to encode a message, including its feedback.
        decode: the time to decode the first payload of a sum.
        add: the time to decode and add each further payload.
    """

    encode: float = 0.0
    decode: float = 0.0
    add: float = 0.0

    def __post_init__(self):
        for field in ("encode", "decode", "add"):
            checks.number(field, getattr(self, field), 0.0)


@dataclasses.dataclass(frozen=True)
class Effort:
    """The effort of one device for a reducer.

    Args:
        rounds: the number of sequential messages, on average over the steps.
        encodes: the number of times that each element of the model is encoded: `1 + 1/n` for two
            shots.
        decodes: the number of sums in which each element is decoded.
        adds: the number of further payloads that are decoded and added for each element.
    """

    rounds: float = 0
    encodes: float = 0.0
    decodes: float = 0.0
    adds: float = 0.0

    def seconds(self, work: Work, elements: int) -> float:
        """The seconds of a device's own arithmetic."""
        passes = self.encodes * work.encode + self.decodes * work.decode + self.adds * work.add
        return elements * passes

    def shared(self, workers: int) -> "Effort":
        """The effort for `1/workers` of the elements."""
        n = workers
        return Effort(self.rounds, self.encodes / n, self.decodes / n, self.adds / n)


@dataclasses.dataclass(frozen=True)
class Price:
    """The price of a mean to one device.

    Args:
        bytes: the bytes that the device sends.
        rounds: the number of sequential messages.
        work: the seconds that do not depend on the link.
    """

    bytes: float = 0.0
    rounds: float = 0.0
    work: float = 0.0

    def __add__(self, other: "Price") -> "Price":
        return Price(self.bytes + other.bytes, self.rounds + other.rounds, self.work + other.work)

    def seconds(self, network: Network) -> float:
        """`rounds · α + bytes / β + work`."""
        return self.rounds * network.latency + self.bytes / network.bandwidth + self.work


def ring(size: float, workers: int) -> Price:
    """The price of a ring all-reduce: `2(n − 1)` messages of `size / n` bytes.

    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    checks.integer("workers", workers, 1)
    return Price(2 * (workers - 1) / workers * size, 2 * (workers - 1))


def all_gather(size: float, workers: int) -> Price:
    """The price of an all-gather of `size` bytes from each worker: `n − 1` messages."""
    checks.integer("workers", workers, 1)
    return Price((workers - 1) * size, workers - 1)


def reduce_scatter(size: float, workers: int) -> Price:
    """The price of a reduce-scatter, or an all-to-all: `n − 1` messages of `size / n` bytes."""
    checks.integer("workers", workers, 1)
    return Price((workers - 1) / workers * size, workers - 1)


def step(
    compute: float, mean: float, *, backward: float = 0.0, overlap: float = 0.0, every: int = 1
) -> float:
    """Seconds of a training step: `compute + max(0, mean − overlap · backward) / every`.

    Args:
        compute: seconds without any communication.
        mean: seconds of the mean of the gradients.
        backward: the seconds of the backward pass within `compute`.
        overlap: the fraction of the backward pass that can overlap with the mean; 0 for none.
        every: the number of steps from one mean to the next.

    Raises:
        ValueError: for negative times, or an overlap out of [0, 1].
    """
    for name, value in (("compute", compute), ("mean", mean), ("backward", backward)):
        checks.number(name, value, 0.0)
    checks.number("overlap", overlap, 0.0, 1.0)
    checks.integer("every", every, 1)
    return compute + max(0.0, mean - overlap * backward) / every


def break_even(
    dense: Price, compressed: Price, *, latency: float = 0.0, hidden: float = 0.0
) -> float:
    """The bandwidth in bytes per second below which compression makes a step shorter.

    With compression, `T` has fewer bytes and more work, so both take the same time at one speed,
    `(B_dense − B_compressed) / (W_compressed − W_dense + (R_compressed − R_dense) α)`. If the dense
    mean is hidden behind the backward pass, compression gains nothing.

    Args:
        dense: the price without compression.
        compressed: the price with compression.
        latency: α, the seconds per message.
        hidden: the seconds of either mean that overlap with computation, and cost nothing.

    Returns:
        0.0 if compression is never faster, `inf` if it is faster on every link.
    """
    saved = dense.bytes - compressed.bytes
    spent = compressed.work - dense.work + (compressed.rounds - dense.rounds) * latency
    if saved <= 0:
        return 0.0 if spent >= 0 or saved < 0 else math.inf
    equal = math.inf if spent <= 0 else saved / spent
    rest = hidden - dense.work - dense.rounds * latency
    bound = math.inf if rest <= 0 else dense.bytes / rest
    return min(equal, bound)
