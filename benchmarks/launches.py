"""Reads from compiled programs how often codecs go through memory on an H100.

    make aot, and then: python benchmarks/launches.py gpu

Each launch of a program (a kernel, a fusion, a copy, a sort) reads its operands from memory and
writes its result. The program counts launches and these bytes, for `jaxcomp.encode` of an array
whose length is no multiple of the bucket, as users call it, and for one that is a multiple. No such
device is needed, and no time is measured: `gpu.py` does that, for the same cases.
"""

import math
import pathlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import aot

_LINE = re.compile(
    r"^(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.*?) (?P<op>[a-z][\w\-]*)\((?P<args>.*)"
)
_ARRAY = re.compile(r"([a-z]+)(\d+)?[\w]*\[([\d,]*)\]")
_FREE = frozenset(
    ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id")
)
"""Instructions without a launch."""


class Launch(NamedTuple):
    """One launch: its kind, the name of its kernel if there is one, and what it moves.

    Attributes:
        kind: "kernel" for a Pallas kernel, else the instruction, such as "fusion" or "copy".
        name: of the kernel, or of the instruction.
        bytes: of its operands and its results.
        times: how often it runs.
    """

    kind: str
    name: str
    bytes: int
    times: int


def bytes_of(shape: str) -> int:
    """The bytes of an array, or of all arrays of a tuple.

    Example:
        >>> bytes_of("(u32[3,64]{1,0}, bf16[8]{0}, pred[])")
        785
    """
    total = 0
    for kind, width, sides in _ARRAY.findall(shape):
        each = 1 if kind == "pred" else -(-int(width or 0) // 8)
        total += each * math.prod(int(side) for side in sides.split(",") if side)
    return total


def launches(text: str) -> list[Launch]:
    """The launches of a compiled program, in the order in which they are issued."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            name = head[2]
            bodies[name], entry = [], name if head[1] else entry
        elif line.startswith("  ") and name:
            bodies[name].append(line.strip())
    return list(_of_body(bodies, entry, 1))


def _of_body(bodies: dict[str, list[str]], body: str, times: int) -> Iterator[Launch]:
    shapes: dict[str, str] = {}
    for line in bodies[body]:
        found = _LINE.match(line)
        if not found:
            continue
        name, shape, op, rest = found.group("name", "shape", "op", "args")
        shapes[name] = shape
        called = re.findall(r"(?:to_apply|body|condition)=%?([\w.\-]+)", line)
        if op in ("call", "while"):
            count = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            for one in called:
                yield from _of_body(bodies, one, times * (int(count[1]) if count else 1))
        elif op not in _FREE and not op.endswith("-done"):
            args = re.findall(r"%([\w.\-]+)", rest.partition("), ")[0])
            fused = re.search(r" calls=%?([\w.\-]+)", line)
            cut = _cut(bodies[fused[1]]) if fused else {}
            read = (bytes_of(cut.get(at, shapes.get(each, ""))) for at, each in enumerate(args))
            # In the stack of names, a kernel's is the last but one.
            kernel = re.search(r"/(jaxcomp_\w+)/pallas_call", line) if op == "custom-call" else None
            kind, name = ("kernel", kernel[1]) if kernel else (op, name)
            yield Launch(kind, name, bytes_of(shape) + sum(read), times)


def _cut(body: list[str]) -> dict[int, str]:
    """The shapes of the slices of those operands of a fusion of which it reads only a slice."""
    numbers = {}
    for line in body:
        found = re.match(r"%([\w.\-]+) = .* parameter\((\d+)\)", line)
        if found:
            numbers[found[1]] = int(found[2])
    cut = {}
    for name, number in numbers.items():
        uses = [line for line in body if re.search(rf"[(\s]%{re.escape(name)}[,)]", line)]
        slices = [re.search(r" = (\S+) (?:dynamic-)?slice\(", line) for line in uses]
        if slices and all(slices):
            cut[number] = " ".join(found[1] for found in slices if found)
    return cut


def record(text: str, size: int) -> dict[str, Any]:
    """The launches of a program for an array of so many bytes, and their traffic in such arrays."""
    found = launches(text)
    kinds: Counter[str] = Counter()
    for one in found:
        kinds[one.kind] += one.times
    moved = sum(one.bytes * one.times for one in found)
    return {
        "launches": dict(kinds),
        "passes": moved / size,
        "largest": [
            [one.name, round(one.bytes * one.times / size, 2)]
            for one in sorted(found, key=lambda one: -one.bytes * one.times)[:8]
        ],
    }


COLUMNS = (
    "program {name} | kernels {kernel} | other launches {other} | "
    "arrays read and written {passes:.2f}"
)


class Kernel(NamedTuple):
    """The machine code of a Pallas kernel, from the assembler.

    Attributes:
        instructions: of a thread; those of a loop count once.
        loops: jumps back.
        registers: of a thread.
        shared: bytes of the memory that threads share.
        narrowest: bytes of the narrowest access to memory.
    """

    instructions: int
    loops: int
    registers: int
    shared: int
    narrowest: int


def kernels_of(dump: pathlib.Path, seen: set[pathlib.Path]) -> dict[str, Kernel]:
    """The kernels of the program compiled last, by name; `seen` are the files of those before."""
    found = {}
    for path in sorted(set(dump.glob("*.ptx")) - seen):
        seen.add(path)
        text = path.read_text()
        if "entry jaxcomp_" not in text:
            continue
        said = aot.assembled(path)
        for name, body in re.findall(r"\.entry (jaxcomp_\w+)\(.*?\n\{(.*?)\n\}", text, re.DOTALL):
            found[name] = _kernel(body, said)
    return found


def _kernel(body: str, said: str) -> Kernel:
    lines = [line.strip() for line in body.splitlines()]
    labels = {line.partition(":")[0]: at for at, line in enumerate(lines) if line.startswith("$")}
    code = [line for line in lines if line.endswith(";") and not line.startswith((".", "//"))]
    back = sum(
        labels.get(target, len(lines)) < at
        for at, line in enumerate(lines)
        for target in re.findall(r"bra(?:\.uni)?\s+(\$\w+)", line)
    )
    widths = [
        int(count or 1) * int(bits) // 8
        for line in code
        for count, bits in re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.[bfsu](\d+) ", line)
    ]
    registers = re.search(r"Used (\d+) registers", said)
    shared = re.search(r"(\d+) bytes smem", said)
    return Kernel(
        len(code),
        back,
        int(registers[1]) if registers else 0,
        int(shared[1]) if shared else 0,
        min(widths, default=0),
    )


def main() -> None:
    with aot.compiler(__doc__, "out/launches", size=50_000_000) as (options, found, dump):
        import gpu_parts
        import jax
        import numpy as np
        import reporting
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        place = NamedSharding(Mesh(np.array(found[:1]), ("x",)), PartitionSpec())
        programs, records = {}, []
        seen: set[pathlib.Path] = set()
        for part in gpu_parts.parts(options.size):
            shapes = jax.eval_shape(part.inputs)
            args = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes
            )
            text = jax.jit(part.run).lower(*args).compile().as_text() or ""
            one = programs[part.name] = record(text, part.bytes)
            kinds = dict(one["launches"])
            kernels = kinds.pop("kernel", 0)
            row = {"name": part.name, "kernel": kernels, "other": sum(kinds.values())}
            records.append({**row, "passes": one["passes"]})
            one["machine"] = {
                name: kernel._asdict() for name, kernel in kernels_of(dump, seen).items()
            }
            print(part.name, one, flush=True)
        table = reporting.Table(
            f"{options.size:,} elements, compiled for an H100", COLUMNS, records
        )
        results = {"target": aot.NAMES[options.target], "programs": programs}
        reporting.show(table, results, options.out / f"{options.target}.md")


if __name__ == "__main__":
    main()
