"""Quantizers whose codes are entropy coded: frequent levels take few bits, rare ones many."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, UInt32
from scipy import special

from jaxcomp import bits, checks
from jaxcomp.backend import axes, xla
from jaxcomp.base import WrappedCodec
from jaxcomp.codecs import symbols as symbols_
from jaxcomp.codecs.payload import QuantizedPayload
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.entropy.coder import Coder
from jaxcomp.entropy.rans import Rans
from jaxcomp.numerics import noise
from jaxcomp.quantize.rounding import Subtractive
from jaxcomp.quantize.scales import MeanAbs, RootMeanSquare
from jaxcomp.types import Array, ArrayLike, AxisName, Key, PyTree

_START = 0x436F6465
"""Folded into the key that all workers share: where in a bucket its stream begins."""

_COUNTED = 2**18
"""Symbols of a step that the table is made from: enough for a ten-thousandth to be seen."""

_SHORT = 4
"""A stream of which an eighth or more is spent on how it begins is not worth it: 32 bits / 4."""

_STRIDE = 0x9E3779B1
"""An odd number, so that it reaches every place among `2^k`."""

_LONGEST = 2**26
"""Elements of a bucket: no symbol takes more than 32 bits, and places of bits are below 2³¹."""

_DRAWN = 2**18
"""Elements of a law that the first table is made from."""


class CodedPayload(NamedTuple):
    """A stream for each bucket, how many of its elements are in it, and what one step is worth."""

    words: UInt32[Array, "n words"]
    kept: Array
    steps: tuple[Array, ...]


class Spent(NamedTuple):
    """The use of the capacity in the last step, on this worker.

    Attributes:
        spare: bytes of the streams that were left empty.
        lost: elements that did not fit, of those that are not zero.
    """

    spare: Float32[Array, ""]
    lost: Float32[Array, ""]


class CodedState(NamedTuple):
    """The state of the codec.

    Attributes:
        codec: the quantizer's state.
        table: the coder's table, the same on all workers; `()` if it is fixed, or there is none.
        total: how often each symbol occurred on all workers, older steps less; likewise.
        own: how often on this worker in the last step; likewise.
        spent: of the last step.
    """

    codec: Any
    table: PyTree
    total: Any
    own: Any
    spent: Spent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coded(WrappedCodec):
    """The codes of a quantizer in a stream of at most `capacity` bits an element.

    Levels are numbered by magnitude and coded by `coder`. Where a bucket's stream is full, its
    other elements are not sent and decode to zero: a residual keeps them, `Stats.lost` counts them,
    and since a stream begins at a random element of the bucket, none is left out for ever. If there
    is room for the packed codes themselves, a bucket that does not fit is sent so, and nothing is
    ever lost.

    Args:
        codec: a quantizer.
        coder: `Rans()`, `Huffman()`, `Elias()` or `Rice()`.
        capacity: bits an element on the wire, beside the bucket's step and a count of two
            bytes (four from 65,536 elements on);
            None for as many as the packed codes take, which saves nothing on a link of static
            shapes, and all of it in `to_bytes`.
        memory: what share of the counts of former steps the table remembers: all workers add up how
            often each symbol occurred, an all-reduce of a kilobyte a step. None for a fixed table.
        law: what buckets look like to a fixed table, and to the first one: "gaussian" or "laplace".

    Raises:
        ValueError: for a codec that is no quantizer, a capacity that is not positive, one that
            leaves elements out where no level is zero, or a memory out of range.

    Example:
        >>> import jaxcomp
        >>> codec = Coded(codec=jaxcomp.qsgd(bits=4, bucket_size=8192), capacity=0.5)
        >>> like = jax.ShapeDtypeStruct((2**20,), jnp.float32)
        >>> 8 * jaxcomp.wire_bytes(codec, like) / like.size
        0.505859375

    References:
        Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, 2017, for coding what is
        quantised at random; Ziv, On universal quantization, 1985, for dither that is taken off.

    Note:
        With a capacity that may leave elements out, the codec is not unbiased, whatever the
        quantizer is, not even where nothing is left out in practice.
    """

    codec: Quantizer
    coder: Coder = Rans()
    capacity: int | float | None = None
    memory: float | None = None
    law: str = "gaussian"

    def __post_init__(self):
        if not isinstance(self.codec, Quantizer):
            raise ValueError(
                "`codec` must be a quantizer, whose levels have numbers, such as jaxcomp.qsgd(); "
                f"got {self.codec!r}. Around a rotation, put it inside: Rotated(codec=Coded(...))"
            )
        checks.part("coder", self.coder, Coder)
        checks.choice("law", self.law, ("gaussian", "laplace"))
        if self.capacity is not None:
            checks.positive("capacity", self.capacity)
        if self.memory is not None:
            checks.number("memory", self.memory, 0.0, 1.0)
            if not self.coder.adaptive:
                raise ValueError(
                    f"`memory` must be None for a code that has no table, got {self.memory} with "
                    f"{self.coder!r}; jaxcomp.codecs.Rans() and jaxcomp.codecs.Huffman() have one"
                )
        if not self._whole and isinstance(self.codec.rounding, Subtractive):
            raise ValueError(
                f"`capacity` must be at least {self.codec.bits} bits, or None, with dither that is "
                f"subtracted, since what is left out would decode to it, got {self.capacity}"
            )
        if not self._whole and self._numbers.zero is None:
            raise ValueError(
                f"`capacity` must be at least {self.codec.bits} bits for levels with no zero among "
                f"them, got {self.capacity} with {self.codec.levels!r}; take levels Uniform"
            )

    @property
    def unbiased(self) -> bool:
        """As the quantizer, if nothing can be lost."""
        return self._whole and self.codec.unbiased

    @property
    def contractive(self) -> bool:
        """As the quantizer; what is lost is no more than what there was."""
        if self.codec.contractive:
            return True
        bound = self.codec.variance_bound(self.bucket_size or _DRAWN)
        return not self._whole and bound is not None and bound < 1

    @property
    def bits_per_element(self) -> float | None:
        """Bits an element of a full bucket, with its step and its count."""
        size = self.bucket_size
        if size is None:
            return None
        packed = 32 * bits.words(size, self.codec.bits) / size
        steps = self.codec.bits_per_element - packed
        return (32 * self._words(size) + 8 * jnp.dtype(_counts(size)).itemsize) / size + steps

    def variance_bound(self, size: int) -> float | None:
        """The quantizer's bound, if nothing can be lost."""
        return self.codec.variance_bound(size) if self._whole else None

    def init(self, like: ArrayLike) -> CodedState:
        spent = Spent(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
        if not self.sided:
            return CodedState(self.codec.init(like), (), (), (), spent)
        total = _occurrences(self.codec, self.law, _near(self.codec, like.shape[1]))
        return CodedState(
            codec=self.codec.init(like),
            table=self._fixed(like.shape[1]),
            total=jnp.asarray(total),
            own=jnp.zeros_like(total),
            spent=spent,
        )

    @property
    def agrees(self) -> bool:
        """Whether the table follows what is sent, or the quantizer agrees."""
        return self.sided or self.codec.agrees

    @property
    def sided(self) -> bool:
        """Whether decoders need a table that changes."""
        return self.memory is not None

    def agree(
        self, key: Key, x: Array, count: Array, state: CodedState, axis_name: AxisName
    ) -> CodedState:
        """The table for what all workers sent so far."""
        inner = self.codec.agree(key, x, count, state.codec, axis_name)
        if self.memory is None:
            return state._replace(codec=inner)
        kept = jnp.float32(self.memory / axes.size(axis_name))
        total = lax.psum(state.total * kept + state.own, axis_name)
        # As long as nobody has sent anything, as at first.
        first = _occurrences(self.codec, self.law, _near(self.codec, x.shape[1]))
        total = jnp.where(jnp.sum(total) > 0, total, jnp.asarray(first))
        return state._replace(codec=inner, total=total, table=self.coder.table(total))

    def side(self, agreed: CodedState) -> PyTree:
        """The table, which every decoder has too; None if it is fixed."""
        return agreed.table if self.sided else None

    def encode(
        self, key: Key, x: Array, count: Array, state: CodedState
    ) -> tuple[CodedPayload, CodedState]:
        n, size = x.shape
        payload, inner = self.codec.encode(key, x, count, state.codec)
        codes = bits.unpack(payload.words, bits=self.codec.bits, size=size)
        symbols = jnp.asarray(self._numbers.symbols)[codes.astype(jnp.int32)]
        symbols = jnp.roll(symbols, -self._start(key, size), axis=1)
        words = self._words(size)
        table = state.table if self.sided else self._fixed(size)
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
            lost = jnp.sum((jnp.arange(size) >= kept[:, None]) & (symbols > 0))
        spare = jnp.sum((32 * words - used).astype(jnp.float32)) / 8
        after = state._replace(codec=inner, spent=Spent(spare, lost.astype(jnp.float32)))
        if self.sided:
            some = symbols.reshape(-1)[:: (n * size // _COUNTED) | 1]
            # The zeros of a worker that takes no part count for nothing.
            own = jnp.where(jnp.any(x != 0), jnp.zeros_like(state.own).at[some].add(1), 0)
            after = after._replace(own=own)
        return CodedPayload(sent, kept.astype(_counts(size)), payload.steps), after

    def decode(self, key: Key, payload: CodedPayload, like: ArrayLike, side: Any = None) -> Array:
        return self.codec.decode(key, self._packed(key, payload, like.shape[1], side), like)

    def decode_sum(
        self,
        keys: Key,
        payloads: CodedPayload,
        like: ArrayLike,
        weights: Array | None = None,
        side: Any = None,
    ) -> Array:
        # One worker after another: of all of them, the codes would take far more than the words.
        packed = lax.map(lambda one: self._packed(keys, one, like.shape[1], side), payloads)
        return self.codec.decode_sum(keys, packed, like, weights)

    def _packed(self, key: Key, payload: CodedPayload, size: int, side: Any) -> QuantizedPayload:
        """The quantizer's payload, with zeros for lost elements."""
        kept, table = payload.kept.astype(jnp.int32), self._fixed(size) if side is None else side
        symbols = self.coder.decode(payload.words, kept, size, table).astype(jnp.int32)
        symbols = jnp.roll(symbols, self._start(key, size), axis=1)
        codes = jnp.asarray(self._numbers.codes)[symbols]
        words = bits.pack(codes, bits=self.codec.bits)
        if self._packs(size):
            coded = (kept == size)[:, None]
            words = jnp.where(coded, words, payload.words[:, : words.shape[1]])
        return QuantizedPayload(words, payload.steps)

    def _start(self, key: Key, size: int) -> Array:
        """The element of each bucket that is coded first."""
        if self._packs(size):
            return jnp.zeros((), jnp.int32)
        word = noise.fold(key.shared, _START)[0]
        return (word % jnp.uint32(max(size, 1))).astype(jnp.int32)

    def _fixed(self, size: int) -> PyTree:
        """The table for buckets of the law."""
        if not self.coder.adaptive:
            return ()
        table = jax.tree.map(jnp.asarray, _table(self, _near(self.codec, size)))
        # Else what a coder makes of it is worked out by the compiler, which takes seconds.
        return lax.optimization_barrier(table)

    @property
    def _whole(self) -> bool:
        """Whether there is room for the packed codes, whatever the size of a bucket."""
        return self.capacity is None or self.capacity >= self.codec.bits

    def _packs(self, size: int) -> bool:
        """Whether there is room for the packed codes of buckets of this size: there is in those so
        short that their stream would be little but its beginning.
        """
        return self._whole or self._chosen(size) < self.coder.least_bits(size) // _SHORT

    def _chosen(self, size: int) -> int:
        """Words of the capacity."""
        return 0 if self.capacity is None else math.ceil(size * self.capacity / 32)

    def _words(self, size: int) -> int:
        """Words of a stream."""
        if size > _LONGEST:
            raise ValueError(
                f"`bucket_size` must be at most {_LONGEST} to be coded, since a stream's bits are "
                f"counted in 32 bits, got buckets of {size} of {self.codec!r}"
            )
        chosen = self._chosen(size)
        return max(chosen, bits.words(size, self.codec.bits)) if self._packs(size) else chosen

    @property
    def _numbers(self) -> symbols_.Numbers:
        return symbols_.numbered(self.codec.levels)


def _counts(size: int) -> Any:
    """The dtype of the number of elements in a stream."""
    return jnp.uint16 if size < 2**16 else jnp.uint32


def _near(codec: Quantizer, size: int) -> int:
    """A size whose table is as good, since tables take a while: in units of a mean, elements lie
    alike in buckets of all sizes.
    """
    if isinstance(codec.scale, RootMeanSquare | MeanAbs):
        return 2**14
    return min(1 << (max(size, 1) - 1).bit_length(), 2**20)


@functools.lru_cache
def _table(codec: Coded, size: int) -> PyTree:
    """The fixed table, as constants: made once, it is the same in every program."""
    with xla.constants():
        table = codec.coder.table(jnp.asarray(_occurrences(codec.codec, codec.law, size)))
        return jax.tree.map(np.asarray, table)


@functools.lru_cache
def _occurrences(codec: Quantizer, law: str, size: int) -> np.ndarray:
    """How often each symbol occurs in buckets of a law."""
    numbers = symbols_.numbered(codec.levels)
    rows = max(_DRAWN // size, 1)
    number = rows * size
    # Quantiles, dealt out by a stride: unlike drawn numbers the same on all machines, and in all
    # versions of numpy. They are rounded where solvers differ.
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

    with xla.constants():
        codes = np.asarray(jax.jit(draw_codes)(jnp.asarray(x)))
    found = np.bincount(numbers.symbols[codes].reshape(-1), minlength=len(numbers.codes))
    return found.astype(np.float32)
