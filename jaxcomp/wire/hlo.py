"""Bytes that the collectives of a compiled program send."""

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxcomp.wire import cost, crossed, trips

_COLLECTIVE = re.compile(
    r" = (?P<shape>.*?) "
    r"(?P<op>all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    r"|collective-broadcast|ragged-all-to-all)(?P<start>-start)?\("
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+)(?: \(.*)? \{$")
_CALLED = re.compile(
    r"\b(?P<kind>calls|to_apply|body|condition|called_computations|branch_computations"
    r"|true_computation|false_computation)=(?:\{(?P<several>[^}]*)\}|%?(?P<one>[\w.\-]+))"
)
_KIND = re.compile(r" (?P<kind>while|conditional|async-update|async-done)\(")
_CHAIN = re.compile(r"channel_id=(\d+), .*\bchain_id=\W*(\w+)")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*[a-z0-9]*)\[(?P<dims>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "bf16": 16, "c64": 64, "c128": 128}


class CollectiveBytes(dict[Any, int]):
    """Bytes by kind of collective, or by axis of a mesh.

    Args:
        sent: the bytes.
        at_least: whether the program may send more, because a loop that sends has an unknown
            number of iterations and counts as one.
    """

    def __init__(self, sent: Mapping[Any, int] = MappingProxyType({}), *, at_least: bool = False):
        super().__init__(sent)
        self.at_least = at_least

    def __repr__(self) -> str:
        return f"at least {super().__repr__()}" if self.at_least else super().__repr__()


def collective_bytes(compiled: Any, mesh: Any = None) -> CollectiveBytes:
    """Bytes that one device sends in a compiled program, by kind of collective or by axis.

    Read from the compiled HLO in its physical layout (padding of tiles included), with the usual
    ring algorithms: of `n` devices, each sends `n − 1` times what it contributes to an
    all-gather, `2(n − 1)/n` of an all-reduce, `(n − 1)/n` of a reduce-scatter's or all-to-all's
    input, and its messages to other devices in a permutation, on average over all devices.

    A collective in a loop counts once per iteration. Where the number of iterations is unknown, as
    for a `while_loop` whose condition depends on data, one iteration counts, and the result says
    so: `at_least` is true, and it prints as `at least {...}`. Of the branches of a
    conditional, only the one that sends most bytes counts: so these are the bytes of the most
    expensive run of the program, such as a step that ends a round of `local_updates`, or one round
    of a graph whose rounds differ.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()`, or its text.
        mesh: the mesh of the program, or a dictionary of the names and sizes of its axes; None for
            bytes by kind of collective. Text has its devices in the order of `mesh.devices.flat`.

    Returns:
        A dictionary, with the attribute `at_least`. Without `mesh`: kind of collective to bytes.
        With `mesh`: axis to bytes, where a collective over several axes has a tuple of their names
        in the order of the mesh, and each message of a permutation counts for the axes that it
        crosses. Entries of zero bytes are left out.

    Raises:
        ValueError: for neither a compiled program nor its text, for a lowered program, or for a
            mesh of another number of devices.

    Example:
        >>> import jax
        >>> collective_bytes(jax.jit(lambda x: x + 1).lower(1.0).compile())
        {}
        >>> text = '''HloModule step, num_partitions=8
        ... %sum = f32[100] all-reduce(%x), replica_groups=[2,4]<=[8]'''
        >>> collective_bytes(text, mesh={"data": 2, "fsdp": 4})
        {'fsdp': 600}
    """
    if not isinstance(compiled, str) and not hasattr(compiled, "as_text"):
        raise ValueError(
            "`compiled` must be a compiled program, as jax.jit(f).lower(...).compile() returns it, "
            f"or its text, got {compiled!r}"
        )
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    if "stablehlo." in text and "HloModule" not in text:
        raise ValueError(
            "`compiled` must be a compiled program, got a lowered one, whose collectives are not "
            "final: call .compile() on it"
        )
    header = text[: text.find("\n")]
    everyone = 1
    for field in ("replica_count", "num_partitions"):
        found = re.search(rf"{field}=(\d+)", header)
        everyone *= int(found.group(1)) if found else 1
    axes = None if mesh is None else crossed.layout(mesh, compiled, everyone)
    program, entry = _program(text, everyone, axes)
    run = _most(program, entry, {})
    sent = {key: math.ceil(size) for key, size in run.sent.items() if size}
    return CollectiveBytes(sent, at_least=run.at_least)


class _Call(NamedTuple):
    """The computations that an instruction calls.

    Attributes:
        names: of the computations.
        times: how often each of them runs.
        kind: `while` or `conditional`; of a conditional, only one of the computations runs.
        known: whether the number of runs is known; otherwise `times` is the least.
    """

    names: list[str]
    times: list[int]
    kind: str = ""
    known: bool = True


class _Computation(NamedTuple):
    """A computation of a program.

    Attributes:
        sent: the kind or axes, and the bytes, of each of its own collectives.
        calls: the calls of its instructions.
    """

    sent: list[tuple[Any, Fraction | int]]
    calls: list[_Call]


class _Run(NamedTuple):
    """The bytes that a run of a computation sends, and whether it may send more."""

    sent: dict[Any, Any]
    at_least: bool = False


def _program(
    text: str, everyone: int, axes: crossed.Layout | None
) -> tuple[dict[str, _Computation], str]:
    """All computations of a program by name, and the name of the one that runs first."""
    program: dict[str, _Computation] = {"": _Computation([], [])}
    name = entry = ""  # Text without computations is one.
    chains: set[tuple[str | Any, ...]] = set()
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        if begun := _COMPUTATION.match(line):
            name = begun["name"]
            entry = name if begun["entry"] else entry
            program[name] = _Computation([], [])
            continue
        lines.setdefault(name, []).append(line)
        if call := _call(line, lines, name):
            program[name].calls.append(call)
        found = _COLLECTIVE.search(line)
        if not found:
            continue
        chain = _CHAIN.search(line)  # A TPU repeats it in each concurrent program.
        if chain and chain.groups() in chains:
            continue
        chains |= {chain.groups()} if chain else set()
        try:
            program[name].sent.extend(_collective(found, line, everyone, axes))
        except (ValueError, LookupError, ArithmeticError):
            raise ValueError(
                "`compiled` must be the whole text of a compiled program, in which this line "
                f"cannot be read: {line.strip()[:120]!r}"
            ) from None
    return program, entry


def _call(line: str, lines: dict[str, list[str]], within: str) -> _Call | None:
    """The call of an instruction, if it calls computations, which stand before it in HLO.

    Args:
        line: the instruction.
        lines: the lines of the computations until here, by name.
        within: the instruction's computation.
    """
    called = [
        (found["kind"], name.strip().removeprefix("%"))
        for found in _CALLED.finditer(line)
        for name in (found["several"] or found["one"] or "").split(",")
    ]
    if not called:
        return None
    instruction = _KIND.search(line)
    kind = instruction["kind"] if instruction else ""
    names = [name for _, name in called]
    if kind.startswith("async"):  # The start of the operation has the same computation.
        return None
    if kind != "while":
        return _Call(names, [1] * len(names), kind)
    parts = {role: lines.get(name, []) for role, name in called}
    loop = trips.Loop(lines[within], parts.get("condition", []), parts.get("body", []))
    bodies = trips.count(line, loop)
    if bodies is None:
        return _Call(names, [1] * len(names), kind, known=False)
    # The condition runs once more, to end the loop.
    return _Call(names, [bodies + (role == "condition") for role, _ in called], kind)


def _collective(
    found: re.Match, line: str, everyone: int, axes: crossed.Layout | None
) -> list[tuple[Any, Fraction | int]]:
    """The kind of the collective of this line, or the axes that it crosses, with bytes sent."""
    op = found["op"]
    size = _size(found, line, everyone)
    pairs = crossed.pairs(line) if op == "collective-permute" else None
    if pairs is None:
        if axes is None or not size:
            return [(op, size)]
        return [(axes.crossed(crossed.groups(line, everyone)), size)]
    # Only some of the devices send to another one in a permutation.
    moved = [pair for pair in pairs if pair[0] != pair[1]]
    share = size * Fraction(1, max(everyone, len(pairs)))
    if axes is None:
        return [(op, share * len(moved))]
    return [(axes.crossed([np.asarray([pair])]), share) for pair in moved]


def _size(found: re.Match, line: str, everyone: int) -> Fraction | int:
    """Bytes one device sends in the collective of this line, if every device takes part."""
    op, group = found["op"], crossed.group_size(line, everyone)
    arrays = list(_ARRAY.finditer(found["shape"]))
    if found["start"]:
        arrays = [a for a in arrays if (a["dtype"], a["dims"]) != ("u32", "")]  # Contexts.
        if op != "all-reduce" and len(arrays) > 1:
            arrays = arrays[len(arrays) // 2 :]  # (operands, results)
    return _sent(op, sum(map(_physical_bytes, arrays)), group)


def _most(program: dict[str, _Computation], name: str, known: dict[str, _Run]) -> _Run:
    """The bytes of a run of a computation in which each conditional sends most.

    `known` holds the computations that were counted before.
    """
    if name in known or name not in program:
        return known.get(name, _Run({}))
    known[name] = _Run({})  # A computation does not call itself; wrong text may.
    totals: dict[Any, Any] = {}
    at_least = False
    for key, size in program[name].sent:
        totals[key] = totals.get(key, 0) + size
    for call in program[name].calls:
        runs = [(_most(program, other, known), n) for other, n in zip(*call[:2], strict=True)]
        sends = any(run.sent for run, _ in runs)
        at_least |= any(run.at_least for run, _ in runs) or (sends and not call.known)
        if call.kind == "conditional":
            runs = [max(runs, key=lambda run: sum(run[0].sent.values()))]
        for run, times in runs:
            for key, size in run.sent.items():
                totals[key] = totals.get(key, 0) + times * size
    known[name] = _Run({key: size for key, size in totals.items() if size}, at_least)
    return known[name]


def _sent(op: str, result: int, group: int) -> Fraction | int:
    """Bytes one device sends, from the bytes of the collective's result."""
    if op == "all-reduce":
        return cost.ring(result, group)
    if op == "reduce-scatter":
        return result * (group - 1)
    if op in ("collective-permute", "collective-broadcast"):
        return result
    return Fraction(result * (group - 1), group)


def _physical_bytes(array: re.Match) -> int:
    """Bytes of an HLO array with its tiles' padding: `u32[4,64]{1,0:T(8,128)}` is 8 × 128 words."""
    dims = [int(d) for d in array["dims"].split(",") if d]
    order, _, tiling = (array["layout"] or "").partition(":")
    tile = re.search(r"T\(([\d,]+)\)", tiling)
    if tile and order:
        sides = [int(t) for t in tile.group(1).split(",")]
        minor_to_major = [int(d) for d in order.split(",")]
        for side, dim in zip(reversed(sides), minor_to_major, strict=False):
            dims[dim] = -(-dims[dim] // side) * side
    name = array["dtype"]
    width = _BITS.get(name) or int(re.findall(r"\d+", name)[0])
    return -(-math.prod(dims) * width // 8)
