"""Range asymmetric numeral systems: a whole row as the digits of one number, in fractions of bits.

A state `x` holds what was coded so far. A symbol of frequency `f` of 4096, the first of whose slots
is `c`, makes it `⌊x / f⌋·4096 + c + x mod f`, so larger by the factor `4096 / f`, which is its
information; before the state outgrows 32 bits, its lower sixteen are put away. What was put away
last is needed first, so a decoder runs backwards, and an encoder that stops leaves a prefix.

A row is dealt out to `lanes`, symbol `t·lanes + l` to lane `l` in step `t`, which all work at the
same time, each with a state and a stack of its own.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float32, Int32, UInt8, UInt16, UInt32

from jaxcomp import checks
from jaxcomp.backend import axes, xla
from jaxcomp.entropy import stream
from jaxcomp.entropy.coder import SYMBOLS, Coder, Counts, Stream, Symbols, Table, Words
from jaxcomp.types import Array

PRECISION = 12
"""Bits of a frequency; the look-up table of 2¹² slots fits the fastest cache."""

_TOTAL = 1 << PRECISION
_HALF = 16
_LOW = 1 << _HALF
"""The smallest state, and the initial one: states have 17 to 32 bits."""

_MOST_LANES = 1024
_BLOCK = 32
"""Steps whose marks fill one word."""

_WORST = PRECISION + math.log2(1 + 1 / 16)
"""The most bits that a symbol of frequency 1 adds to a state, which has at least 16 before."""


@dataclasses.dataclass(frozen=True)
class Rans(Coder, public=("checked", "encode_mixed", "head_bits")):
    """Interleaved rANS: within a hundredth of a bit of the entropy, plus 48 bits per lane.

    A stream consists of units of sixteen bits: the number of units that each lane has written (two
    units per lane if it takes 2¹⁶ steps or more), the lanes' states, and the units of each lane,
    lane after lane.

    Args:
        lanes: the number of symbols coded in parallel; None for the power of two below
            `size / symbols_a_lane`, from 1 to 1024.
        symbols_a_lane: the number of symbols of a row for each lane, whose cost is 48 bits.

    Raises:
        ValueError: for lanes or symbols that are not positive.

    Example:
        >>> coder, symbols = Rans(), jnp.array([[0, 1, 0, 2]], jnp.uint32)
        >>> table = coder.table(jnp.array([2.0, 1.0, 1.0]))
        >>> coded = coder.encode(symbols, jnp.array([4]), table, words=3)
        >>> coder.decode(coded.words, coded.kept, 4, table)
        Array([[0, 1, 0, 2]], dtype=uint32)

    References:
        Duda, `Asymmetric numeral systems <https://arxiv.org/abs/1311.2540>`_, 2013; Giesen,
        `Interleaved entropy coders <https://arxiv.org/abs/1402.3392>`_, 2014.

    Note:
        Giesen's lanes share one stack, so each step needs a sum over lanes to find each lane's
        position. Here each lane has its own stack, for sixteen bits more a lane.
    """

    lanes: int | None = None
    symbols_a_lane: int = 2048
    adaptive = True

    def __post_init__(self):
        if self.lanes is not None:
            checks.integer("lanes", self.lanes, 1)
        checks.integer("symbols_a_lane", self.symbols_a_lane, 1)

    def table(self, counts: Float32[Array, " symbols"]) -> Table:
        """The frequency of each symbol, of 4096 in all."""
        return frequencies(counts)

    def encode(self, symbols: Symbols, count: Counts, table: Table, words: int) -> Stream:
        begins = jnp.cumsum(table, dtype=jnp.uint32) - table
        return self.encode_mixed(symbols.astype(jnp.uint8), count, table, begins, words)

    def encode_mixed(
        self,
        symbols: UInt8[Array, "n size"] | UInt16[Array, "n size"],
        count: Counts,
        table: Table,
        begins: Table,
        words: int,
    ) -> Stream:
        """Encodes symbols of several tables, each of which has 4096 slots.

        A decoder must know the table of each symbol.

        Args:
            symbols: `[n, size]`, places in `table`.
            count: `[n]`, the symbols of each row that are coded.
            table: the frequency of each symbol of each table, one table after another.
            begins: the first slot of each symbol in its table.
            words: the length of a stream.
        """
        n, size = symbols.shape
        plan = self._plan(size)
        room = 2 * words - plan.head
        if not plan.steps or room < plan.lanes:  # The first step might not fit.
            zero = jnp.zeros_like(count)
            return Stream(jnp.zeros((n, words), jnp.uint32), zero, zero)
        shape = (n, plan.blocks, plan.block, plan.lanes)
        padded = jnp.pad(symbols, ((0, 0), (0, math.prod(shape[1:]) - size)))
        dealt = jnp.transpose(padded.reshape(shape), (1, 2, 0, 3))
        # A frequency with its first slot in the upper bits, so that one look-up is enough.
        packed = (begins << PRECISION) | table
        done, low, marks = _run(dealt, count, packed, plan, room)
        rows = jnp.moveaxis(marks, 0, 2).reshape(n, -1)
        lengths = jnp.sum(lax.population_count(rows.reshape(n, plan.lanes, -1)), axis=2)
        body = _gather_lanes(low, rows, plan, room)
        body = jnp.where(jnp.arange(room)[None] < done.used[:, None], body, 0)
        head = [lengths, lengths >> _HALF] if plan.long else [lengths]
        head = jnp.concatenate([*head, done.state & (_LOW - 1), done.state >> _HALF], axis=1)
        coded = jnp.concatenate([head.astype(jnp.uint16), body], axis=1)
        coded = jnp.where(done.kept[:, None] > 0, coded, 0)
        bits = jnp.where(done.kept > 0, _HALF * (plan.head + done.used), 0)
        return Stream(stream.join_halves(coded), done.kept, bits)

    def decode(self, words: Words, kept: Counts, size: int, table: Table) -> Symbols:
        return self.checked(words, kept, size, table)[0]

    def checked(
        self, words: Words, kept: Counts, size: int, table: Table
    ) -> tuple[Symbols, Bool[Array, " n"]]:
        """Decodes like `decode`, and returns whether each row is a valid stream.

        Decoding a valid stream ends in the initial state, without unread data. Use it for messages
        of untrusted senders.
        """
        n, plan = words.shape[0], self._plan(size)
        if not plan.steps:
            return jnp.zeros((n, 0), jnp.uint32), jnp.all(words == 0, axis=1) & (kept == 0)
        halves = stream.halves(words)
        if halves.shape[1] <= plan.head:
            halves = jnp.pad(halves, ((0, 0), (0, plan.head + 1 - halves.shape[1])))
        head, body = halves[:, : plan.head].astype(jnp.uint32), halves[:, plan.head :]
        *lengths, low, high = jnp.split(head, plan.head // plan.lanes, axis=1)
        lengths = lengths[0] | (lengths[1] << _HALF) if plan.long else lengths[0]
        # A lane stores at most one unit per step, and all lanes together at most the available
        # room.
        lengths = jnp.minimum(lengths, plan.steps).astype(jnp.int32)
        ends = jnp.minimum(jnp.cumsum(lengths, axis=1), body.shape[1])
        first = (low | (high << _HALF)).astype(jnp.uint32)
        inside = jnp.clip(kept, 0, size)
        symbols, state, left = _undone(body, first, ends, inside, _slots(table), plan)
        used = jnp.sum(lengths, axis=1)
        clean = jnp.all((state == _LOW) & (left == ends - lengths), axis=1)
        rest = jnp.arange(body.shape[1])[None] >= used[:, None]
        clean = clean & jnp.all(~rest | (body == 0), axis=1) & (used <= body.shape[1])
        empty = jnp.all(words == 0, axis=1) & (kept == 0)
        return symbols[:, :size], (clean & (kept == inside) & (kept > 0)) | empty

    def head_bits(self, size: int) -> int:
        """Bits of a row for the lane lengths and the lane states."""
        return _HALF * self._plan(size).head

    def least_bits(self, size: int) -> int:
        """Bits of a row before its first symbols."""
        plan = self._plan(size)
        return _HALF * (plan.head + plan.lanes)

    def worst_bits(self, size: int, symbols: int) -> int:
        del symbols
        plan = self._plan(size)
        # Plus room for one step, without which the encoder does not begin the last one.
        return _HALF * (plan.head + plan.lanes * (1 + math.floor(plan.steps * _WORST / _HALF)))

    def _plan(self, size: int) -> "_Plan":
        lanes = self.lanes
        if lanes is None:
            share = size // self.symbols_a_lane
            lanes = min(1 << max(share.bit_length() - 1, 0), _MOST_LANES)
        return _Plan(lanes, -(-size // lanes))


class _Plan(NamedTuple):
    """The static assignment of a row's symbols to lanes."""

    lanes: int
    steps: int

    @property
    def block(self) -> int:
        return min(self.steps, _BLOCK)

    @property
    def blocks(self) -> int:
        return -(-self.steps // self.block)

    @property
    def long(self) -> bool:
        """Whether a lane's length may not fit into sixteen bits."""
        return self.steps >= _LOW

    @property
    def head(self) -> int:
        """Units of sixteen bits before the units of the lanes."""
        return self.lanes * (4 if self.long else 3)


def frequencies(counts: Float32[Array, " symbols"]) -> UInt32[Array, " slots"]:
    """Frequencies in proportion to the counts: at least one each, and 4096 in all.

    `fᵢ = max(1, round(s·cᵢ))` for the largest `s` whose frequencies are not too many, and of the
    few that are still missing, one each to those that are nearest to the next integer.

    Example:
        >>> frequencies(jnp.array([3.0, 1.0, 0.0]))
        Array([3071, 1024,    1], dtype=uint32)

    Raises:
        ValueError: for more symbols than 256, or none.
    """
    checks.integer("symbols", counts.size, 1, SYMBOLS)
    counts = jnp.clip(jnp.where(counts > 0, counts, 0), 0, 2.0**126)
    # A symbol that occurs alone gets the frequency 4095, which a state can hold.
    counts = jnp.pad(counts, (0, 1)) if counts.size == 1 else counts
    # Scaled by a power of two, which rounds nothing: the sum of counts is the same in any order.
    largest = lax.bitcast_convert_type(jnp.max(counts), jnp.int32)
    exponent = largest & 0x7F800000
    shares = counts * lax.bitcast_convert_type((254 << 23) - exponent, jnp.float32)
    total = jnp.sum(shares)
    shares = jnp.where(total > 0, shares / jnp.where(total > 0, total, 1), 1 / counts.size)

    def round_at(scale: Array) -> tuple[Array, Array]:
        exact = xla.block_fma(shares * scale) + 0.5
        whole = jnp.maximum(jnp.floor(exact), 1)
        return whole, exact - whole

    def halve(_: Array, span: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = span
        middle = (low + high) / 2
        fits = jnp.sum(round_at(middle)[0]) <= _TOTAL
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    # At the upper bound the sum is too large; at zero each symbol has frequency one.
    high = jnp.full((), _TOTAL + counts.size, jnp.float32)
    low, _ = lax.fori_loop(0, 36, halve, axes.match_vma(0 * total, high)[:2])
    whole, rest = round_at(low)
    missing = _TOTAL - jnp.sum(whole).astype(jnp.int32)
    rank = jnp.argsort(jnp.argsort(-rest))
    return whole.astype(jnp.uint32) + (rank < missing).astype(jnp.uint32)


def _slots(table: Table) -> UInt32[Array, "4096"]:
    """The symbol of each slot, its frequency, and the slot's number among the symbol's slots."""
    begins = jnp.cumsum(table, dtype=jnp.uint32) - table
    slot = jnp.arange(_TOTAL, dtype=jnp.uint32)
    marks = jnp.zeros(_TOTAL, jnp.int32).at[begins.astype(jnp.int32)].add(1, mode="drop")
    symbol = jnp.clip(jnp.cumsum(marks) - 1, 0, min(table.size, SYMBOLS) - 1)
    frequency = table[symbol] & (_TOTAL - 1)
    within = (slot - begins[symbol]) & (_TOTAL - 1)
    return symbol.astype(jnp.uint32) | (frequency << 8) | (within << 20)


class _Lanes(NamedTuple):
    """The encoder's state: `state` and `marks` are `uint32[n, lanes]`, the rest is `int32[n]`.

    Attributes:
        state: the number in each lane.
        marks: one bit for each step of this block in which the lane wrote a unit.
        used: the units that the row's lanes have written.
        kept: the number of the row's symbols coded so far.
    """

    state: Array
    marks: Array
    used: Array
    kept: Array


def _run(
    symbols: UInt8[Array, "blocks block n lanes"] | UInt16[Array, "blocks block n lanes"],
    count: Counts,
    packed: Table,
    plan: _Plan,
    room: int,
) -> tuple[_Lanes, UInt16[Array, "blocks block n lanes"], UInt32[Array, "blocks n lanes"]]:
    """The final lanes, the lower half of each state before each step, and all marks."""
    lane = jnp.arange(plan.lanes)[None]

    def step(lanes: _Lanes, now: tuple[Array, Array, Array]) -> tuple[_Lanes, Array]:
        time, bit, symbol = now
        going = (lanes.kept == time * plan.lanes) & (lanes.used + plan.lanes <= room)
        active = going[:, None] & (time * plan.lanes + lane < count[:, None])
        # Compiled separately: otherwise each of the results below would repeat the look-up.
        entry = lax.optimization_barrier(jnp.take(packed, symbol.astype(jnp.int32), mode="clip"))
        frequency, begin = entry & (_TOTAL - 1), entry >> PRECISION
        full = active & ((lanes.state >> (32 - PRECISION)) >= frequency)
        low = lanes.state.astype(jnp.uint16)
        state = jnp.where(full, lanes.state >> _HALF, lanes.state)
        quotient, rest = _divide(state, frequency)
        state = jnp.where(active, (quotient << PRECISION) + begin + rest, lanes.state)
        marks = lanes.marks | (full.astype(jnp.uint32) << bit)
        used = lanes.used + jnp.sum(full, axis=1, dtype=jnp.int32)
        kept = jnp.where(going, jnp.minimum(lanes.kept + plan.lanes, count), lanes.kept)
        return _Lanes(state, marks, used, kept), low

    def block(lanes: _Lanes, now: tuple[Array, Array]) -> tuple[_Lanes, tuple[Array, Array]]:
        number, symbols = now
        bits = jnp.arange(plan.block, dtype=jnp.uint32)
        times = number * plan.block + bits.astype(jnp.int32)
        lanes = lanes._replace(marks=jnp.zeros_like(lanes.marks))
        lanes, low = lax.scan(step, lanes, (times, bits, symbols))
        return lanes, (low, lanes.marks)

    # Derived from existing arrays, since a scan's types of replication must not change.
    nothing = count - count
    empty = nothing[:, None].astype(jnp.uint32) + jnp.zeros((1, plan.lanes), jnp.uint32)
    lanes = _Lanes(*axes.match_vma(empty + _LOW, empty, nothing, nothing, symbols, packed)[:4])
    lanes, (low, marks) = lax.scan(block, lanes, (jnp.arange(plan.blocks), symbols))
    return lanes, low, marks


def _divide(x: UInt32[Array, "..."], by: UInt32[Array, "..."]) -> tuple[Array, Array]:
    """Quotient, below 2²⁰, and remainder: by floats, of which a processor divides eight at a time.

    They are off by less than one, so whatever they are the correction makes it exact.
    """
    divisor = by.astype(jnp.int32)
    half = (x >> 1).astype(jnp.int32).astype(jnp.float32)
    guess = (half / divisor.astype(jnp.float32) * 2).astype(jnp.int32)
    rest = x.astype(jnp.int32) - guess * divisor
    guess, rest = jnp.where(rest < 0, guess - 1, guess), jnp.where(rest < 0, rest + divisor, rest)
    over = rest >= divisor
    guess, rest = jnp.where(over, guess + 1, guess), jnp.where(over, rest - divisor, rest)
    return guess.astype(jnp.uint32), rest.astype(jnp.uint32)


def _gather_lanes(
    low: UInt16[Array, "blocks block n lanes"], marks: Words, plan: _Plan, room: int
) -> UInt16[Array, "n room"]:
    """The stored words, lane after lane."""
    n = marks.shape[0]
    place = stream.ones(marks, room)
    word, bit = place // _BLOCK, place % _BLOCK
    lane, block = word // plan.blocks, word % plan.blocks
    row, time = jnp.arange(n, dtype=jnp.int32)[:, None], block * plan.block + bit
    if low.size >= 2**31:  # Positions have 32 bits.
        return low.reshape(-1, n, plan.lanes)[time, row, lane]
    return jnp.take(low.reshape(-1), (time * n + row) * plan.lanes + lane, mode="clip")


def _undone(
    body: UInt16[Array, "n halves"],
    state: UInt32[Array, "n lanes"],
    ends: Int32[Array, "n lanes"],
    kept: Counts,
    slots: UInt32[Array, "4096"],
    plan: _Plan,
) -> tuple[UInt32[Array, "n padded"], UInt32[Array, "n lanes"], Int32[Array, "n lanes"]]:
    """The symbols, from the last to the first, the lanes' states then, and their places."""
    n, length = body.shape
    flat = body.reshape(-1)
    begin = jnp.arange(n, dtype=jnp.int32)[:, None] * length
    lane = jnp.arange(plan.lanes)[None]

    def step(lanes: tuple[Array, Array], time: Array) -> tuple[tuple[Array, Array], Array]:
        state, place = lanes
        active = time * plan.lanes + lane < kept[:, None]
        slot = (state & (_TOTAL - 1)).astype(jnp.int32)
        # Compiled separately: otherwise each of the results below would repeat the look-up.
        entry = lax.optimization_barrier(jnp.take(slots, slot, mode="clip"))
        symbol, frequency, within = entry & 0xFF, (entry >> 8) & (_TOTAL - 1), entry >> 20
        less = frequency * (state >> PRECISION) + within
        short = active & (less < _LOW)
        back = jnp.take(flat, place - 1, mode="clip").astype(jnp.uint32)
        less = jnp.where(short, (less << _HALF) | back, less)
        found = jnp.where(active, symbol, 0).astype(jnp.uint8)
        return (jnp.where(active, less, state), jnp.where(short, place - 1, place)), found

    state, place, *_ = axes.match_vma(state, ends + begin, kept, slots, flat)
    times = jnp.arange(plan.steps)
    (state, place), found = lax.scan(step, (state, place), times, reverse=True)
    symbols = jnp.moveaxis(found, 0, 1).reshape(n, -1).astype(jnp.uint32)
    return symbols, state, place - begin
