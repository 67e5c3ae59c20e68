"""Reads from schedules how much an H100 and a TPU v5e compute beside a compressed mean.

    make aot, and then: python benchmarks/overlap.py gpu; python benchmarks/overlap.py tpu

The compilers that `make aot` installs compile a training step of a small transformer over eight
devices, dense and compressed, with the payload in one buffer or in a few. The program counts which
fraction of the floating-point operations of matrix products the schedule issues beside a
collective. No such device is needed, and no time is measured: how long a collective takes depends
on the links.

The text of a compiled program is in the order in which it is issued. A collective is under way
between its `-start` and its `-done`, and, on a TPU, in every fusion that carries a piece of it.
"""

import math
import re
from typing import Any, NamedTuple

import aot

_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(-start|-done)?\("
)


class Overlap(NamedTuple):
    """The arithmetic of a program.

    Attributes:
        flops: of all matrix products.
        beside: the fraction of them that is issued while a collective is under way.
        starts: by collective, the fraction of the arithmetic that is issued before it begins.
    """

    flops: float
    beside: float
    starts: tuple[tuple[str, float], ...]


def read(text: str, kinds: frozenset[str]) -> Overlap:
    """The overlap of a compiled program with its collectives of these kinds.

    A loop counts as one iteration, whose collectives begin and end within it.
    """
    program = _Program(text)
    starts: list[tuple[str, float]] = []
    total, beside = _walk(program, program.entry, kinds, starts, 0.0)
    scale = total or 1.0
    return Overlap(total, beside / scale, tuple((kind, at / scale) for kind, at in starts))


def _walk(
    program: "_Program",
    body: str,
    kinds: frozenset[str],
    starts: list[tuple[str, float]],
    total: float,
) -> tuple[float, float]:
    """The arithmetic up to the end of a computation, and how much of its own is beside others."""
    beside = 0.0
    under_way: set[str] = set()
    for line in program.bodies[body]:
        name = _name(line)
        loop = re.search(r" while\(.* body=%?([\w.\-]+)", line)
        if loop and not under_way:
            total, inside = _walk(program, loop[1], kinds, starts, total)
            beside += inside
            continue
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
    return total, beside


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
        """Whether a fusion advances a collective by one piece."""
        return any("chain_id=" in line for line in self.bodies.get(body, ()))

    def flops_of(self, line: str, shapes: dict[str, list[int]] | None = None) -> float:
        """Operations of one instruction and of the computations that it calls."""
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


def steps(found: list[Any], layers: int, width: int) -> dict[str, Any]:
    """By name, functions that compile a step."""
    import byte_lm_model
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import training
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import jaxcomp

    mesh = Mesh(np.array(found[: aot.WORKERS]), (training.AXIS,))
    model = byte_lm_model.ByteModel(layers, width)
    like = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 256), jnp.int32))
    split = NamedSharding(mesh, PartitionSpec(training.AXIS))
    tokens = jax.ShapeDtypeStruct((8 * aot.WORKERS, 256), jnp.int32, sharding=split)
    link = jaxcomp.Link(jaxcomp.qsgd_inf(bits=4))
    ways: dict[str, Any] = {"dense": jaxcomp.Dense()}
    for parts in (1, 2, 4, 8):
        ways[f"gather, in {parts}"] = jaxcomp.Gather(link, collectives=parts)
        ways[f"two shots, in {parts}"] = jaxcomp.TwoShot(link, link, collectives=parts)

    def compiled(reducer: Any) -> Any:
        tx = optax.chain(jaxcomp.compressed_mean(reducer, training.AXIS), optax.sgd(0.1))
        args = (*aot.training_state(tx, like, mesh, training.AXIS), (tokens, tokens))
        return training.build_step(model, tx, mesh).lower(*args).compile()

    return {name: lambda way=way: compiled(way) for name, way in ways.items()}


COLUMNS = (
    "mean {name} | bytes a device {bytes:,} | collectives {collectives} | "
    "first begins after {first} | beside them {share}"
)


def measure(compiled: Any) -> dict[str, Any]:
    import jaxcomp

    moved = jaxcomp.collective_bytes(compiled)
    sent = sum(moved.values())
    # Collectives of small dense leaves move few bytes, but would count for a long time.
    kinds = frozenset(kind for kind, size in moved.items() if size > 0.01 * sent)
    return {"bytes": sent, **read(compiled.as_text(), kinds)._asdict()}


def main() -> None:
    with aot.compiler(__doc__, "out/overlap", layers=8, width=512) as (options, devices, _):
        results = {}
        for name, compile_ in steps(devices, options.layers, options.width).items():
            results[name] = measure(compile_())
            print(name, flush=True)
    import reporting

    records = [
        {
            **found,
            "name": name,
            "collectives": len(found["starts"]),
            "first": f"{100 * min((at for _, at in found['starts']), default=1.0):.0f} %",
            "share": f"{100 * found['beside']:.1f} %",
        }
        for name, found in results.items()
    ]
    title = f"Arithmetic beside collectives, compiled for an {aot.NAMES[options.target]}"
    path = options.out / f"{options.target}.md"
    reporting.show(reporting.Table(title, COLUMNS, records), {"steps": results}, path)


if __name__ == "__main__":
    main()
