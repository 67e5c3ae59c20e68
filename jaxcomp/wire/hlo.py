"""Bytes that the collectives of a compiled program send."""

import math
import re
from fractions import Fraction
from typing import Any, NamedTuple

from jaxcomp.wire import cost

_COLLECTIVE = re.compile(
    r" = (?P<shape>.*?) "
    r"(?P<op>all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    r"|collective-broadcast|ragged-all-to-all)(?P<start>-start)?\("
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+)(?: \(.*)? \{$")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|called_computations|branch_computations"
    r"|true_computation|false_computation)=(?:\{(?P<several>[^}]*)\}|%?(?P<one>[\w.\-]+))"
)
_CONDITIONAL = re.compile(r" conditional\(")
_PAIRS = re.compile(r"source_target_pairs=\{(?P<pairs>(?:\{\d+,\d+\},?)*)\}")
_CHAIN = re.compile(r"channel_id=\d+(?=, .*\bchain_id=)")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*[a-z0-9]*)\[(?P<dims>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "bf16": 16, "c64": 64, "c128": 128}


def collective_bytes(compiled: Any) -> dict[str, int]:
    """Bytes that one device sends in a compiled program, by kind of collective.

    Read from the compiled HLO in its physical layout (padding of tiles included), with the usual
    ring algorithms: of `n` devices, each sends `n − 1` times what it contributes to an
    all-gather, `2(n − 1)/n` of an all-reduce, `(n − 1)/n` of a reduce-scatter's or all-to-all's
    input, and its messages to other devices in a permutation, on average over all devices.

    A collective inside a loop counts once. Of the branches of a conditional, only the one that
    sends most bytes counts: so these are the bytes of the most expensive run of the program, such
    as a step that ends a round of `local_updates`, or one round of a graph whose rounds differ.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()`, or its text.

    Returns:
        Operation name to bytes; operations that do not occur are left out.

    Raises:
        ValueError: for what is neither, or a lowered program.

    Example:
        >>> import jax
        >>> collective_bytes(jax.jit(lambda x: x + 1).lower(1.0).compile())
        {}
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
    program, entry = _program(text, everyone)
    return {op: math.ceil(size) for op, size in _most(program, entry, set()).items() if size}


class _Computation(NamedTuple):
    """A computation of a program.

    Attributes:
        sent: the operations and bytes of its own collectives.
        calls: the names of the computations that each of its instructions calls, and whether only
            one of them runs.
    """

    sent: list[tuple[str, Fraction | int]]
    calls: list[tuple[list[str], bool]]


def _program(text: str, everyone: int) -> tuple[dict[str, _Computation], str]:
    """All computations of a program by name, and the name of the one that runs first."""
    program: dict[str, _Computation] = {"": _Computation([], [])}
    name = entry = ""  # Text without computations is one.
    chains: set[str] = set()
    for line in text.splitlines():
        if begun := _COMPUTATION.match(line):
            name = begun["name"]
            entry = name if begun["entry"] else entry
            program[name] = _Computation([], [])
            continue
        called = [
            found.strip().removeprefix("%")
            for call in _CALLED.finditer(line)
            for found in (call["several"] or call["one"] or "").split(",")
        ]
        if called:
            program[name].calls.append((called, bool(_CONDITIONAL.search(line))))
        found = _COLLECTIVE.search(line)
        if not found:
            continue
        chain = _CHAIN.search(line)  # A TPU repeats it in each concurrent program.
        if chain and chain[0] in chains:
            continue
        chains |= {chain[0]} if chain else set()
        try:
            program[name].sent.append((found["op"], _size(found, line, everyone)))
        except (ValueError, LookupError, ArithmeticError):
            raise ValueError(
                "`compiled` must be the whole text of a compiled program, in which this line "
                f"cannot be read: {line.strip()[:120]!r}"
            ) from None
    return program, entry


def _size(found: re.Match, line: str, everyone: int) -> Fraction | int:
    """Bytes one device sends in the collective of this line."""
    op, group = found["op"], _group_size(line, everyone)
    arrays = list(_ARRAY.finditer(found["shape"]))
    if found["start"]:
        arrays = [a for a in arrays if (a["dtype"], a["dims"]) != ("u32", "")]  # Contexts.
        if op != "all-reduce" and len(arrays) > 1:
            arrays = arrays[len(arrays) // 2 :]  # (operands, results)
    size = _sent(op, sum(map(_physical_bytes, arrays)), group)
    permuted = _PAIRS.search(line) if op == "collective-permute" else None
    if not permuted:
        return size
    # Only some of the devices send to another one in a permutation.
    pairs = re.findall(r"(\d+),(\d+)", permuted["pairs"])
    others = sum(source != target for source, target in pairs)
    return size * Fraction(others, max(everyone, len(pairs)))


def _most(program: dict[str, _Computation], name: str, seen: set[str]) -> dict[str, Any]:
    """Bytes by operation in a run of a computation in which each conditional sends most.

    The computations that are counted are added to `seen`, and count once.
    """
    totals: dict[str, Any] = {}
    if name in seen or name not in program:
        return totals
    seen.add(name)
    parts: list[dict[str, Any]] = [{op: size} for op, size in program[name].sent]
    for called, one_runs in program[name].calls:
        if one_runs:
            runs = [(_most(program, other, also := set(seen)), also) for other in called]
            most, also = max(runs, key=lambda run: sum(run[0].values()))
            seen |= also
            parts.append(most)
        else:
            parts += [_most(program, other, seen) for other in called]
    for part in parts:
        for op, size in part.items():
            totals[op] = totals.get(op, 0) + size
    return totals


def _sent(op: str, result: int, group: int) -> Fraction | int:
    """Bytes one device sends, from the bytes of the collective's result."""
    if op == "all-reduce":
        return cost.ring(result, group)
    if op == "reduce-scatter":
        return result * (group - 1)
    if op in ("collective-permute", "collective-broadcast"):
        return result
    return Fraction(result * (group - 1), group)


def _group_size(line: str, everyone: int) -> int:
    found = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if found:
        return int(found.group(1))
    found = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if found:
        return len(found.group(1).split(","))
    found = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line)
    if found:  # The groups are written as names of mesh axes.
        sizes = dict(re.findall(r"'?([\w.]+)'?=(\d+)", found.group(1)))
        return math.prod(int(sizes[name]) for name in re.findall(r"[\w.]+", found.group(2)))
    return everyone


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
