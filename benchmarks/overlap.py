"""What an H100 and a TPU v5e would compute while a compressed mean is under way.

    make aot, and then: python benchmarks/overlap.py gpu; python benchmarks/overlap.py tpu

A training step of a small transformer over eight devices is compiled for them, by the compilers
that `make aot` installs, dense and compressed, with the payload in one buffer or in a few. Counted
is what share of the arithmetic of the step the schedule issues beside a collective. No such device
is needed, and no time is told: how long a collective takes depends on the links.
"""

import argparse
import pathlib
import tempfile
from typing import Any

import aot
import schedule


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
        state = jax.eval_shape(tx.init, like)

        def placed(x, spec):
            shape = (aot.WORKERS, *x.shape[1:]) if training.AXIS in spec else x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec))

        args = (
            jax.tree.map(lambda x: placed(x, PartitionSpec()), like),
            jax.tree.map(placed, state, jaxcomp.state_specs(state, training.AXIS)),
            (tokens, tokens),
        )
        return training.build_step(model, tx, mesh).lower(*args).compile()

    return {name: lambda way=way: compiled(way) for name, way in ways.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", choices=aot.NAMES)
    parser.add_argument("--wheels", type=pathlib.Path, default=pathlib.Path(".aot"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/overlap"))
    options = parser.parse_args()
    wheels = options.wheels.resolve()
    if not (wheels / options.target).is_dir():
        parser.error(f"--wheels has no folder {options.target!r}; `make aot` installs it")
    with tempfile.TemporaryDirectory() as folder:
        aot.prepare(options.target, wheels, pathlib.Path(folder))
        rows, results = [], {}
        for name, compile_ in steps(
            aot.devices(options.target), options.layers, options.width
        ).items():
            import jaxcomp

            compiled = compile_()
            moved = jaxcomp.collective_bytes(compiled)
            sent = sum(moved.values())
            # Those of small leaves, which stay dense, are under way for long, and do not matter.
            kinds = frozenset(kind for kind, size in moved.items() if size > 0.01 * sent)
            seen = schedule.read(compiled.as_text(), kinds)
            first = min((at for _, at in seen.starts), default=1.0)
            results[name] = {"bytes": sent, **seen._asdict()}
            rows.append(
                (
                    name,
                    f"{sent:,}",
                    str(len(seen.starts)),
                    f"{100 * first:.0f} %",
                    f"{100 * seen.beside:.1f} %",
                )
            )
            print(", ".join(rows[-1]), flush=True)
    from harness import show

    title = f"Arithmetic beside collectives, compiled for an {aot.NAMES[options.target]}"
    columns = ("mean", "bytes a device", "collectives", "first begins after", "beside them")
    show(title, columns, rows, {"steps": results}, options.out / f"{options.target}.md")


if __name__ == "__main__":
    main()
