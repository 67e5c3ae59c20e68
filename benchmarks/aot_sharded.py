"""Compiles sharded training for eight H100 and TPU v5e: what moves, and what computes beside it.

    make aot, and then: python benchmarks/aot_sharded.py gpu; python benchmarks/aot_sharded.py tpu

A fully sharded network of eight layers, dense in bfloat16 and with weights of 8 and gradients of 4
bits, gathered layer by layer and inside a loop; a tensor-parallel block; tokens to experts; a
pipeline. It is checked that compressed arrays move as buffers of words, of as many bytes as
`jaxcomp.collectives` says. No such device is needed, and no time is measured.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import aot
import overlap

LAYERS, WIDTH, TOKENS = 8, 1024, 2048
HOSTS = ("hosts", "devices")


class Case(NamedTuple):
    """A program.

    Attributes:
        name: of it.
        compiled: the compiled program.
        said: the bytes that its collectives should move; None for a dense one.
        hosts: the mesh of hosts and devices; None for one axis.
    """

    name: str
    compiled: Any
    said: int | None
    hosts: Any = None


def cases(found: list[Any]) -> Iterator[Case]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    import jaxcomp
    from jaxcomp import algorithms, collectives

    mesh = Mesh(np.array(found[: aot.WORKERS]), ("x",))
    eight, four = jaxcomp.qsgd_inf(bits=8), jaxcomp.qsgd_inf(bits=4)

    def array(spec: Any, *shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    x, key = array(P("x"), TOKENS, WIDTH), array(P(), dtype=jnp.uint32)

    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x.astype(jnp.bfloat16) @ w).astype(x.dtype)

    def unrolled(params: Any, x: Any) -> Any:
        for name in sorted(params):
            x = layer(x, params[name])
        return jnp.mean(x**2)

    def looped(params: Any, x: Any) -> Any:
        body = jax.checkpoint(lambda x, own: (layer(x, jaxcomp.gathered(own)), None))
        return jnp.mean(jax.lax.scan(body, x, params["blocks"])[0] ** 2)

    codecs: dict[str, dict[str, Any]] = {
        "bfloat16": {"weights": None},
        "8-bit weights, 4-bit gradients": {"weights": eight, "gradients": four},
    }
    for name, pair in codecs.items():
        settings = {**pair, "dtype": jnp.bfloat16}
        f = jaxcomp.fully_sharded(unrolled, mesh, "x", P("x"), **settings)
        params = {f"layer{i}": array(P("x"), WIDTH, WIDTH) for i in range(LAYERS)}
        said = sum(sum(one) for one in f.link_bytes(params).values())
        program = jax.jit(f).lower(params, x, key=key).compile()
        yield Case(f"fully sharded, {name}", program, None if "bf" in name else said)
        f = jaxcomp.fully_sharded(looped, mesh, "x", P(None, "x"), stacked=("blocks*",), **settings)
        blocks = {"blocks": array(P(None, "x"), LAYERS, WIDTH, WIDTH)}
        sent = f.link_bytes(blocks)["x"]
        program = jax.jit(f).lower(blocks, x, key=key).compile()
        twice = 2 * sent.forward + sent.backward  # Gathered again in the backward pass.
        yield Case(f"fully sharded in a loop, {name}", program, None if "bf" in name else twice)

    # Two hosts of four: gradients are added up within a host first, dense.
    hosts = Mesh(np.array(found[: aot.WORKERS]).reshape(2, -1), HOSTS)
    split = P(None, HOSTS)
    blocks = jax.ShapeDtypeStruct(
        (LAYERS, WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(hosts, split)
    )
    batch = jax.ShapeDtypeStruct(
        (TOKENS, WIDTH), jnp.float32, sharding=NamedSharding(hosts, P(HOSTS))
    )
    number = jax.ShapeDtypeStruct((), jnp.uint32, sharding=NamedSharding(hosts, P()))
    for name, policy in (
        ("bfloat16", None),
        ("8-bit weights, 4-bit gradients", None),
        ("8-bit weights, 4-bit gradients, a second copy", jaxcomp.second_copy),
    ):
        pair = codecs[name.removesuffix(", a second copy")]

        def twice_sharded(params: Any, x: Any, policy: Any = policy) -> Any:
            def body(x: Any, own: Any) -> Any:
                return layer(x, jaxcomp.gathered(own)), None

            return jnp.mean(jax.lax.scan(jax.checkpoint(body, policy=policy), x, params)[0] ** 2)

        settings = {**pair, "dtype": jnp.bfloat16, "stacked": ("",)}
        f = jaxcomp.fully_sharded(twice_sharded, hosts, HOSTS, split, **settings)
        sent = f.link_bytes(blocks)
        program = jax.jit(f).lower(blocks, batch, key=number).compile()
        forward = {axis: 2 * sent[axis].forward for axis in HOSTS}
        if policy is not None:
            forward["hosts"] = sent["hosts"].forward
        said = sum(forward[axis] + sent[axis].backward for axis in HOSTS)
        title = f"fully sharded over two hosts in a loop, {name}"
        yield Case(title, program, None if "bf" in name else said, hosts)

    def over(f: Any, specs: Any, args: Any) -> Any:
        return (
            jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs))
            .lower(*args)
            .compile()
        )

    whole = array(P(), TOKENS, WIDTH)
    weights = array(P(None, "x"), WIDTH, 4 * WIDTH), array(P("x"), 4 * WIDTH, WIDTH)
    for name, codec in (("dense", None), ("8 bits", eight)):
        block = algorithms.tensor_parallel(
            lambda x, into, out: jax.nn.relu(x @ into) @ out, "x", codec
        )

        def loss(x: Any, *w: Any, block: Any = block) -> Any:
            return jnp.sum(block(x, *w, key=0) ** 2)

        program = over(jax.grad(loss, (0, 1, 2)), (P(), P(None, "x"), P("x")), (whole, *weights))
        there = collectives.wire_bytes(collectives.psum, whole, codec, aot.WORKERS).forward
        back = collectives.wire_bytes(collectives.pvary, whole, codec, aot.WORKERS).backward
        yield Case(f"tensor parallel, {name}", program, None if codec is None else there + back)
    for name, codec in (("dense", None), ("mxfp8", jaxcomp.mx("mxfp8"))):
        moe = algorithms.experts(lambda tokens, w: tokens @ w, "x", codec, combine=codec)

        def routed(x: Any, w: Any, moe: Any = moe) -> Any:
            return jnp.sum(moe(x, w[0], key=0) ** 2)

        own = array(P("x"), aot.WORKERS, WIDTH, WIDTH)
        program = over(jax.grad(routed, (0, 1)), (P("x"), P("x")), (x, own))
        like = jax.ShapeDtypeStruct((TOKENS // aot.WORKERS, WIDTH), jnp.float32)
        sizes = collectives.wire_bytes(
            collectives.all_to_all, like, codec, aot.WORKERS, split_axis=0, concat_axis=0
        )
        yield Case(f"experts, {name}", program, None if codec is None else 2 * sum(sizes))


COLUMNS = (
    "program {name} | bytes a device {bytes:,} | as said {said} | collectives {collectives} | "
    "of words {words} | beside them {share}"
)


def record(case: Case) -> dict[str, Any]:
    """The row of a program, whose bytes and words are checked."""
    import jaxcomp

    text, moved = case.compiled.as_text(), jaxcomp.collective_bytes(case.compiled)
    sent = sum(moved.values())
    begun = re.compile(r" (all|reduce|collective)-(?!precision)[a-z-]+(?<!-done)\(")
    lines = [line for line in text.splitlines() if begun.search(line)]
    words = sum("u32[" in line.partition(" = ")[2].partition("(%")[0] for line in lines)
    if case.said is not None:
        # A TPU pads the words for each worker to tiles of 1,024; the loss itself is dense.
        room = len(lines) * aot.WORKERS * 4096 + 64
        if not case.said <= sent <= 1.02 * case.said + room:
            raise SystemExit(f"{case.name}: {moved}, expected {case.said}")
        if words < len(lines) - 1:
            raise SystemExit(f"{case.name}: {words} of {len(lines)} collectives are of words")
    between = {}
    if case.hosts is not None:
        by_axis = jaxcomp.collective_bytes(case.compiled, case.hosts)
        between = {"between hosts": by_axis["hosts"]}
    kinds = frozenset(kind for kind, size in moved.items() if size > 0.01 * sent)
    found = overlap.read(text, kinds)
    return {
        "name": case.name,
        "bytes": sent,
        "said": "" if case.said is None else f"{case.said:,}",
        "collectives": len(lines),
        "words": words,
        "share": f"{100 * found.beside:.1f} %",
        "by kind": moved,
        **between,
    }


def main() -> None:
    with aot.compiler(__doc__, "out/aot_sharded") as (options, devices, _):
        records = []
        for case in cases(devices):
            records.append(record(case))
            print(records[-1], flush=True)
    import reporting

    title = f"Sharded training, compiled for eight {aot.NAMES[options.target]}"
    path = options.out / f"{options.target}.md"
    reporting.show(reporting.Table(title, COLUMNS, records), {"programs": records}, path)


if __name__ == "__main__":
    main()
