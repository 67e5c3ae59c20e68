"""Quantizers with entropy coding: frequent levels take few bits, rare ones many."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, UInt32

from jaxcomp import bits, checks
from jaxcomp.backend import axes, xla
from jaxcomp.base import Facts, Hints, WrappedCodec
from jaxcomp.codecs import symbols as symbols_
from jaxcomp.codecs.payload import QuantizedPayload
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.entropy.coder import Coder
from jaxcomp.entropy.rans import Rans
from jaxcomp.lazy import Lazy
from jaxcomp.numerics import noise
from jaxcomp.quantize.rounding import Subtractive
from jaxcomp.quantize.scales import MeanAbs, RootMeanSquare
from jaxcomp.types import Array, ArrayLike, AxisName, Key, PyTree, Weights

special = Lazy("scipy.special")

_START = 0x436F6465
"""Folded into the shared key, for the place in a bucket where its stream begins."""

_COUNTED = 2**18
"""Symbols of a step that the table is made from: enough for a ten-thousandth to be seen."""

_SHORT = 4
"""Words of the shortest stream, as header bits over this: its header is below 1/8."""

_STRIDE = 0x9E3779B1
"""An odd number, so that it reaches every place among `2^k`."""

_LONGEST = 2**26
"""The largest bucket: a symbol has at most 32 bits, and positions of bits are below 2³¹."""

_UNIT = 2**12
"""Elements of the buckets of a leaf that is shorter than a bucket: the head of a stream is then a
hundredth of a bit per element.
"""

_DRAWN = 2**18
"""Elements of the distribution that the first table is made from."""


class CodedPayload(NamedTuple):
    """A stream, its number of elements, and the step size, for each bucket."""

    words: UInt32[Array, "n words"]
    kept: Array
    steps: tuple[Array, ...]


class Spent(NamedTuple):
    """The use of the capacity in the last step, on this worker.

    Attributes:
        spare: the empty bytes of the streams.
        lost: the number of nonzero elements that did not fit.
    """

    spare: Float32[Array, ""]
    lost: Float32[Array, ""]


class CodedState(NamedTuple):
    """The state of the codec.

    Attributes:
        codec: the quantizer's state.
        table: the coder's table, the same on all workers; `()` if it is fixed, or there is none.
        total: the decaying count of each symbol on all workers, or `()`.
        own: the count of each symbol on this worker in the last step, or `()`.
        spent: the use of the capacity in the last step.
    """

    codec: Any
    table: PyTree
    total: Any
    own: Any
    spent: Spent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coded(WrappedCodec):
    """Entropy codes a quantizer's codes into a stream of at most `capacity` bits per element.

    Levels are numbered by magnitude and coded by `coder`. When a bucket's stream is full, its other
    elements are not sent and decode to zero: a residual keeps them, and `Stats.lost` counts them.
    A stream begins at a random element of the bucket, so each element is sent sooner or later. If
    the capacity has room for the packed codes themselves, a bucket that does not fit is sent as
    packed codes, and no element is ever lost.

    Args:
        codec: a quantizer.
        coder: `Rans()`, `Huffman()`, `Elias()` or `Rice()`.
        capacity: bits per element on the wire, beside the bucket's step and a count of two
            bytes (four from 65,536 elements on);
            None for the size of the packed codes, which saves nothing in collectives of static
            shapes, but shortens the output of `to_bytes`.
        memory: the decay of the symbol counts that the table is made from, which all workers sum
            in an all-reduce of a kilobyte per step. None for a fixed table.
        law: the distribution for a fixed table, and for the first table: "gaussian" or "laplace".

    Raises:
        ValueError: for a codec that is not a quantizer, a capacity that is not positive, a capacity
            that may lose elements if no level is zero, or a memory out of range.

    Example:
        >>> import jaxcomp
        >>> codec = Coded(codec=jaxcomp.qsgd(bits=4, bucket_size=8192), capacity=0.5)
        >>> like = jax.ShapeDtypeStruct((2**20,), jnp.float32)
        >>> 8 * jaxcomp.wire_bytes(codec, like) / like.size
        0.505859375

    References:
        Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, 2017, for coding after
        stochastic rounding; Ziv, On universal quantization, 1985, for subtractive dither.

    Note:
        With a capacity that may lose elements, the codec counts as biased, even with an unbiased
        quantizer and if no element is lost in practice.
    """

    codec: Quantizer
    coder: Coder = Rans()
    capacity: int | float | None = None
    memory: float | None = None
    law: str = "gaussian"

    def __post_init__(self):
        if not isinstance(self.codec, Quantizer):
            raise ValueError(
                "`codec` must be a quantizer with numbered levels, such as jaxcomp.qsgd(), got "
                f"{self.codec!r}; with a rotation, put it inside: Rotated(codec=Coded(...))"
            )
        checks.part("coder", self.coder, Coder)
        checks.choice("law", self.law, ("gaussian", "laplace"))
        if self.capacity is not None:
            checks.positive("capacity", self.capacity)
        if self.memory is not None:
            checks.number("memory", self.memory, 0.0, 1.0)
            if not self.coder.adaptive:
                raise ValueError(
                    f"`memory` must be None for a coder without a table, got {self.memory} with "
                    f"{self.coder!r}; jaxcomp.codecs.Rans() and jaxcomp.codecs.Huffman() have one"
                )
        if not self._whole and isinstance(self.codec.rounding, Subtractive):
            raise ValueError(
                f"`capacity` must be at least {self.codec.bits} bits, or None, with subtractive "
                f"dither, since lost elements would decode to the dither, got {self.capacity}"
            )
        if not self._whole and self._numbers.zero is None:
            raise ValueError(
                f"`capacity` must be at least {self.codec.bits} bits for levels without zero, got "
                f"{self.capacity} with {self.codec.levels!r}; use levels Uniform"
            )

    @functools.cached_property
    def hints(self) -> Hints:
        """4,096 elements for longer buckets: each size of a stream is a program of its own."""
        size = self.bucket_size
        return Hints(alone=1 / 2, unit=_UNIT if size is not None and size > _UNIT else None)

    @property
    def unbiased(self) -> bool:
        """Whether the quantizer is unbiased and no element can be lost."""
        return self._whole and self.codec.unbiased

    @property
    def contractive(self) -> bool:
        """Whether the quantizer is contractive; a lost element's error is the element itself."""
        if self.codec.contractive:
            return True
        bound = self.codec.variance_bound(self.bucket_size or _DRAWN)
        return not self._whole and bound is not None and bound < 1

    @functools.cached_property
    def facts(self) -> Facts:
        """A table that adapts to the symbols is agreed on, and decoders need it."""
        known, adapts = super().facts, self.memory is not None
        agrees = adapts or known.agrees
        return dataclasses.replace(known, bits_per_element=self._claim, agrees=agrees, sided=adapts)

    @property
    def _claim(self) -> float | None:
        """Bits an element of a full bucket, with its step and its count."""
        size = self.bucket_size
        if size is None:
            return None
        packed = 32 * bits.words(size, self.codec.bits) / size
        steps = cast(float, self.codec.facts.bits_per_element) - packed
        return (32 * self._words(size) + 8 * jnp.dtype(_counts(size)).itemsize) / size + steps

    def variance_bound(self, size: int, peak: float | None = None) -> float | None:
        """The quantizer's bound if no element can be lost, else None."""
        del peak
        return self.codec.variance_bound(size) if self._whole else None

    def init(self, like: ArrayLike) -> CodedState:
        spent = Spent(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
        if not self.facts.sided:
            return CodedState(self.codec.init(like), (), (), (), spent)
        total = _occurrences(self.codec, self.law, _near(self.codec, like.shape[1]))
        return CodedState(
            codec=self.codec.init(like),
            table=self._own_table(like.shape[1]),
            total=jnp.asarray(total),
            own=jnp.zeros_like(total),
            spent=spent,
        )

    def agree(
        self, key: Key, x: Array, count: Array, state: CodedState, axis_name: AxisName
    ) -> CodedState:
        """Updates the table to the symbols that all workers have sent so far."""
        inner = self.codec.agree(key, x, count, state.codec, axis_name)
        if self.memory is None:
            return state._replace(codec=inner)
        kept = jnp.float32(self.memory / axes.size(axis_name))
        total = lax.psum(state.total * kept + state.own, axis_name)
        # No worker has sent anything yet, as in the first step.
        first = _occurrences(self.codec, self.law, _near(self.codec, x.shape[1]))
        total = jnp.where(jnp.sum(total) > 0, total, jnp.asarray(first))
        return state._replace(codec=inner, total=total, table=self.coder.table(total))

    def side(self, agreed: CodedState) -> PyTree:
        """The table, which all decoders share; None if it is fixed."""
        return agreed.table if self.facts.sided else None

    def encode(
        self, key: Key, x: Array, count: Array, state: CodedState
    ) -> tuple[CodedPayload, CodedState]:
        n, size = x.shape
        payload, inner = self.codec.encode(key, x, count, state.codec)
        codes = bits.unpack(payload.words, bits=self.codec.bits, size=size)
        symbols = jnp.asarray(self._numbers.symbols)[codes.astype(jnp.int32)]
        symbols = jnp.roll(symbols, -self._start(key, size), axis=1)
        words = self._words(size)
        table = state.table if self.facts.sided else self._own_table(size)
        everything = jnp.full(n, size, jnp.int32)
        stream = self.coder.encode(symbols, everything, table, words)
        kept, sent, used = stream.kept, stream.words, stream.bits
        if self._packs(size):
            fits, room = kept == size, words - payload.words.shape[1]
            packed = jnp.pad(payload.words, ((0, 0), (0, room)))
            sent = jnp.where(fits[:, None], sent, packed)
            used = jnp.where(fits, used, 32 * payload.words.shape[1])
            kept, lost = jnp.where(fits, kept, 0), jnp.zeros(())
        else:
            lost = jnp.sum((jnp.arange(size)[None] >= kept[:, None]) & (symbols > 0))
        spare = jnp.sum((32 * words - used).astype(jnp.float32)) / 8
        after = state._replace(codec=inner, spent=Spent(spare, lost.astype(jnp.float32)))
        if self.facts.sided:
            some = symbols.reshape(-1)[:: (n * size // _COUNTED) | 1]
            # Do not count the zeros of a non-participating worker.
            own = jnp.where(jnp.any(x != 0), jnp.zeros_like(state.own).at[some].add(1), 0)
            after = after._replace(own=own)
        return CodedPayload(sent, kept.astype(_counts(size)), payload.steps), after

    def decode(self, key: Key, payload: CodedPayload, like: ArrayLike, side: Any = None) -> Array:
        return self.codec.decode(key, self._repack(key, payload, like.shape[1], side), like)

    def decode_sum(
        self,
        keys: Key,
        payloads: CodedPayload,
        like: ArrayLike,
        weights: Weights = None,
        side: Any = None,
    ) -> Array:
        # Decode one worker after another: the codes of all at once would take much more memory.
        packed = lax.map(lambda one: self._repack(keys, one, like.shape[1], side), payloads)
        return self.codec.decode_sum(keys, packed, like, weights)

    def _repack(self, key: Key, payload: CodedPayload, size: int, side: Any) -> QuantizedPayload:
        """The quantizer's payload, with zeros for lost elements."""
        kept = payload.kept.astype(jnp.int32)
        table = self._own_table(size) if side is None else side
        symbols = self.coder.decode(payload.words, kept, size, table).astype(jnp.int32)
        symbols = jnp.roll(symbols, self._start(key, size), axis=1)
        codes = jnp.asarray(self._numbers.codes)[symbols]
        words = bits.pack(codes, bits=self.codec.bits)
        if self._packs(size):
            coded = (kept == size)[:, None]
            words = jnp.where(coded, words, payload.words[:, : words.shape[1]])
        return QuantizedPayload(words, payload.steps)

    def _start(self, key: Key, size: int) -> Array:
        """The index of the first coded element of each bucket."""
        if self._packs(size):
            return jnp.zeros((), jnp.int32)
        word = noise.fold(key.shared, _START)[0]
        return (word % jnp.uint32(max(size, 1))).astype(jnp.int32)

    def _own_table(self, size: int) -> PyTree:
        """The table for buckets with the distribution `law`."""
        if not self.coder.adaptive:
            return ()
        table = jax.tree.map(jnp.asarray, _table(self, _near(self.codec, size)))
        # Otherwise the compiler folds the coder's work on the constant, which takes seconds.
        return lax.optimization_barrier(table)

    @property
    def _whole(self) -> bool:
        """Whether the capacity holds the packed codes for every bucket size."""
        return self.capacity is None or self.capacity >= self.codec.bits

    def _packs(self, size: int) -> bool:
        """Whether the capacity holds the packed codes of buckets of this size.

        It does for buckets so short that the stream's header would be most of it.
        """
        return self._whole or self._capacity_words(size) < self.coder.least_bits(size) // _SHORT

    def _capacity_words(self, size: int) -> int:
        """Words of the capacity."""
        return 0 if self.capacity is None else math.ceil(size * self.capacity / 32)

    def _words(self, size: int) -> int:
        """Words of a stream."""
        if size > _LONGEST:
            raise ValueError(
                f"`bucket_size` must be at most {_LONGEST} for entropy coding, since a stream's "
                f"bits are counted in 32 bits, got buckets of {size} of {self.codec!r}"
            )
        chosen = self._capacity_words(size)
        return max(chosen, bits.words(size, self.codec.bits)) if self._packs(size) else chosen

    @property
    def _numbers(self) -> symbols_.Numbers:
        return symbols_.number_levels(self.codec.levels)


def _counts(size: int) -> Any:
    """The dtype of the number of elements in a stream."""
    return jnp.uint16 if size < 2**16 else jnp.uint32


def _near(codec: Quantizer, size: int) -> int:
    """A bucket size whose table serves this size too, because making a table takes a while.

    In units of a mean, the distribution of elements hardly depends on the bucket size.
    """
    if isinstance(codec.scale, RootMeanSquare | MeanAbs):
        return 2**14
    return min(1 << (max(size, 1) - 1).bit_length(), 2**20)


@functools.lru_cache
def _table(codec: Coded, size: int) -> PyTree:
    """The fixed table as constants, made once, so that it is the same in every program."""
    table = xla.evaluate(codec.coder.table, _occurrences(codec.codec, codec.law, size))
    return jax.tree.map(np.asarray, table)


@functools.lru_cache
def _occurrences(codec: Quantizer, law: str, size: int) -> np.ndarray:
    """The frequency of each symbol in buckets with the distribution `law`."""
    numbers = symbols_.number_levels(codec.levels)
    rows = max(_DRAWN // size, 1)
    number = rows * size
    # Use quantiles in a strided order: unlike random numbers, they are the same on all machines
    # and in all versions of numpy. They are rounded to remove differences between solvers.
    chance = (np.arange(number) * _STRIDE % number + 0.5) / number
    tail = np.minimum(chance, 1 - chance)
    inverse = special.ndtri(tail) if law == "gaussian" else np.log(2 * tail)
    x = np.round(np.where(chance < 0.5, inverse, -inverse), 5).astype(np.float32)
    x = x.reshape(rows, size)
    alone = dataclasses.replace(codec, implementation=None, shared=False)

    def draw_codes(x: Array) -> Array:
        seed = jnp.zeros(2, jnp.uint32)
        key = Key(seed, seed, jnp.zeros((), jnp.uint32))
        payload, _ = alone.encode(key, x, jnp.full(rows, size, jnp.int32), alone.init(x))
        return bits.unpack(payload.words, bits=codec.bits, size=size)

    codes = np.asarray(xla.evaluate(draw_codes, x))
    found = np.bincount(numbers.symbols[codes].reshape(-1), minlength=len(numbers.codes))
    return found.astype(np.float32)
