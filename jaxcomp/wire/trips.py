"""How often a loop of a compiled program runs.

XLA writes the number at the loop where it knows it, but not for TPUs. There, the loops of
`jax.lax.scan` and `fori_loop` still show it: an element of their carry starts at a constant, grows
by a constant, and is compared with a constant.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OPERATION = re.compile(r"^\s*(?:ROOT )?%[\w.\-]+ = .*? (?P<op>[a-z\-]+)\((?P<rest>.*)")


class Loop(NamedTuple):
    """The lines of a loop.

    Attributes:
        here: the computation of the loop's instruction.
        condition: the computation of its condition.
        body: the computation of its body.
    """

    here: Sequence[str]
    condition: Sequence[str]
    body: Sequence[str]


def count(line: str, loop: Loop) -> int | None:
    """The number of iterations of a loop, whose instruction is in `line`; None if it is unknown."""
    if found := _KNOWN.search(line):
        return int(found[1])
    try:
        return _counted(line, loop)
    except (LookupError, ValueError, RecursionError):
        return None  # A loop of another form.


def _counted(line: str, loop: Loop) -> int:
    test = _find(loop.condition, None, "compare")
    if "direction=LT" not in test["rest"]:
        raise ValueError
    counter, bound = _operands(test)
    at = _index(loop.condition, counter)
    after = _find(loop.body, _operands(_find(loop.body, None, "tuple"))[at], "add")
    before, growth = _operands(after)
    if _index(loop.body, before) != at:
        raise ValueError
    step = _constant(loop.body, growth)
    if step < 1:
        raise ValueError
    start = _operands(_find(loop.here, _operands(_match(line))[0], "tuple"))[at]
    distance = _constant(loop.condition, bound) - _constant(loop.here, start)
    return max(0, -(-distance // step))


def _find(lines: Sequence[str], name: str | None, op: str) -> re.Match:
    """The instruction of this name, or the root, behind its copies."""
    begin = "ROOT %" if name is None else f"%{name} = "
    found = _match(next((line for line in lines if begin in line), ""))
    if found["op"] == "copy":
        return _find(lines, _operands(found)[0], op)
    if found["op"] != op:
        raise LookupError
    return found


def _match(line: str) -> re.Match:
    found = _OPERATION.match(line)
    if found is None:
        raise LookupError
    return found


def _operands(found: re.Match) -> list[str]:
    return re.findall(r"%([\w.\-]+)", found["rest"])


def _index(lines: Sequence[str], name: str) -> int:
    """The index of the carry's element that has this name."""
    element = _find(lines, name, "get-tuple-element")
    carry = _operands(element)[0]
    _find(lines, carry, "parameter")
    index = re.search(r"\bindex=(\d+)", element["rest"])
    if index is None:
        raise LookupError
    return int(index[1])


def _constant(lines: Sequence[str], name: str) -> int:
    return int(_find(lines, name, "constant")["rest"].partition(")")[0])
