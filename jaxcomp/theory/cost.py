"""The cost of a mean: the α–β model of a link, and the work of codecs beside it.

`T = rounds · α + bytes / β + work`: a collective over `n` devices is so many messages one after
another, each of which takes `α` seconds however small it is, so many bytes that a device sends at
`β` bytes a second, and so many seconds of encoding and decoding.
"""

import dataclasses
import math

from jaxcomp import checks


@dataclasses.dataclass(frozen=True)
class Network:
    """A link: of a worker, or of a host whose devices share it.

    Args:
        bandwidth: bytes a second that it can send, β: 1 Gbit/s is 1.25e8.
        latency: seconds that a message takes beside, α.

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
        encode: encoding a message, and what its feedback does.
        decode: decoding the first payload of a sum.
        add: decoding each further one onto it.
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
        rounds: messages one after another.
        encodes: how many times each element of the model is encoded: `1 + 1/n` by two shots.
        decodes: of how many sums each element is decoded.
        adds: how many more payloads of each are decoded onto a sum.
    """

    rounds: int = 0
    encodes: float = 0.0
    decodes: float = 0.0
    adds: float = 0.0

    def seconds(self, work: Work, elements: int) -> float:
        """The part of it that a device's own arithmetic takes."""
        passes = self.encodes * work.encode + self.decodes * work.decode + self.adds * work.add
        return elements * passes

    def shared(self, workers: int) -> "Effort":
        """The same for a share of the elements."""
        n = workers
        return Effort(self.rounds, self.encodes / n, self.decodes / n, self.adds / n)


@dataclasses.dataclass(frozen=True)
class Price:
    """The price of a mean to one device.

    Args:
        bytes: what it sends.
        rounds: messages one after another.
        work: seconds that do not depend on the link.
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
    """An all-reduce round a ring: `2(n − 1)` messages of `size / n` bytes.

    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    checks.integer("workers", workers, 1)
    return Price(2 * (workers - 1) / workers * size, 2 * (workers - 1))


def all_gather(size: float, workers: int) -> Price:
    """Everyone's `size` bytes to everyone: `n − 1` messages."""
    checks.integer("workers", workers, 1)
    return Price((workers - 1) * size, workers - 1)


def reduce_scatter(size: float, workers: int) -> Price:
    """A share of the sum to everyone, and as much for an all-to-all: `n − 1` shares of `size`."""
    checks.integer("workers", workers, 1)
    return Price((workers - 1) / workers * size, workers - 1)


def step(
    compute: float, mean: float, *, backward: float = 0.0, overlap: float = 0.0, every: int = 1
) -> float:
    """Seconds of a training step: `compute + max(0, mean − overlap · backward) / every`.

    Args:
        compute: seconds without any communication.
        mean: seconds of the mean of the gradients.
        backward: what of `compute` is the backward pass.
        overlap: the fraction of it that the mean can run beside: 0 where nothing overlaps.
        every: how many steps go by from one mean to the next.

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
    """The bandwidth in bytes a second below which compressing makes a step shorter.

    Compressed, `T` has fewer bytes and more work: there is one speed at which both take as long,
    `(B_dense − B_compressed) / (W_compressed − W_dense + (R_compressed − R_dense) α)`; and where
    the dense mean hides behind the backward pass, there is nothing left to win.

    Args:
        dense: without compression.
        compressed: with it.
        latency: seconds a message, α.
        hidden: seconds of either that cost nothing, since something else is computed meanwhile.

    Returns:
        0.0 if it never pays, `inf` if it does on every link.
    """
    saved = dense.bytes - compressed.bytes
    spent = compressed.work - dense.work + (compressed.rounds - dense.rounds) * latency
    if saved <= 0:
        return 0.0 if spent >= 0 or saved < 0 else math.inf
    equal = math.inf if spent <= 0 else saved / spent
    rest = hidden - dense.work - dense.rounds * latency
    bound = math.inf if rest <= 0 else dense.bytes / rest
    return min(equal, bound)
