"""What of a compiled program runs while a collective is under way, read from its schedule.

The text of a compiled program is in the order in which it is issued. A collective is under way
between its `-start` and its `-done`, and, on a TPU, in every fusion that carries a piece of it
along. What is counted are floating-point operations of matrix products.
"""

import math
import re
from typing import NamedTuple

_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(-start|-done)?\("
)


class Overlap(NamedTuple):
    """Of a program's arithmetic, as fractions.

    Attributes:
        flops: of all matrix products.
        beside: what of them is issued while a collective is under way.
        starts: by collective, how much of the arithmetic is issued before it begins.
    """

    flops: float
    beside: float
    starts: tuple[tuple[str, float], ...]


def read(text: str, kinds: frozenset[str]) -> Overlap:
    """The overlap of a compiled program with its collectives of these kinds."""
    program = _Program(text)
    total = beside = 0.0
    under_way: set[str] = set()
    starts: list[tuple[str, float]] = []
    for line in program.bodies[program.entry]:
        name = _name(line)
        work = program.flops_of(line)
        carried = any(program.carries(body) for body in _called(line)) and work > 0
        found = _COLLECTIVE.search(line)
        found = found if found and found[1] in kinds else None
        if found and found[2] == "-done":
            begun = re.search(r"-done\([^%]*%([\w.\-]+)", line)
            under_way.discard(begun[1] if begun else "")
        elif found:
            starts.append((found[1], total))
            under_way |= {name} if found[2] else set()
        total += work
        beside += work if under_way or carried else 0.0
    scale = total or 1.0
    return Overlap(total, beside / scale, tuple((kind, at / scale) for kind, at in starts))


class _Program:
    """The computations of a program: their lines, and the arithmetic in them."""

    def __init__(self, text: str):
        self.bodies: dict[str, list[str]] = {}
        self.entry, self._known = "", {}
        for line in text.splitlines():
            head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if head:
                name = head[2]
                self.bodies[name] = []
                self.entry = name if head[1] else self.entry
            elif line.startswith("  ") and self.bodies:
                self.bodies[name].append(line.strip())

    def carries(self, body: str) -> bool:
        """Whether a fusion takes a collective one piece further."""
        return any("chain_id=" in line for line in self.bodies.get(body, ()))

    def flops_of(self, line: str, shapes: dict[str, list[int]] | None = None) -> float:
        """Of one instruction, with what it calls."""
        if _COLLECTIVE.search(line):
            return 0.0
        own = _product(line, shapes or {})
        return own + sum(self._flops(body) for body in _called(line))

    def _flops(self, body: str) -> float:
        if body not in self._known:
            self._known[body] = 0.0
            lines = self.bodies.get(body, [])
            shapes = {_name(line): _shape(line) for line in lines}
            self._known[body] = sum(self.flops_of(line, shapes) for line in lines)
        return self._known[body]


def _called(line: str) -> list[str]:
    return re.findall(r"(?:calls|to_apply|body)=%?([\w.\-]+)", line)


def _name(line: str) -> str:
    found = re.match(r"(?:ROOT )?%?([\w.\-]+) = ", line)
    return found[1] if found else ""


def _shape(line: str) -> list[int]:
    found = re.search(r" = \(?\w+\[([\d,]*)\]", line)
    return [int(side) for side in found[1].split(",") if side] if found else []


def _product(line: str, shapes: dict[str, list[int]]) -> float:
    """Twice the elements of the result, times the length of each sum."""
    found = re.search(r" (dot|convolution)\((?:\S+ )?%?([\w.\-]+)", line)
    if not found:
        return 0.0
    left = shapes.get(found[2]) or []
    if found[1] == "dot":
        sides = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line)
        inner = [int(side) for side in sides[1].split(",") if side] if sides else []
    else:
        labels = re.search(r"dim_labels=(\w+)_", line)
        inner = [labels[1].index("f")] if labels else []
    window = re.search(r"window=\{size=([\dx]+)", line)
    taps = math.prod(map(int, window[1].split("x"))) if window else 1
    return 2.0 * math.prod(_shape(line)) * taps * math.prod(left[side] for side in inner if left)
