"""Measures what compiling a compressed mean takes, for every recipe on models of many shapes.

    python benchmarks/compile.py

Nothing is run: `tx.update` under `shard_map` is lowered and compiled from shapes, over simulated
devices, and the lines of its StableHLO are counted. The same table has the seconds that
`init_state` and `describe` take, which work on shapes and allocate once.
"""

import inspect
import time
from typing import Any

import jax
import jax.numpy as jnp
import reporting
from jax.sharding import Mesh, PartitionSpec as P
from rich.progress import track

import jaxcomp
from jaxcomp.planning.models import gpt2, resnet50
from jaxcomp.recipes import catalogue

WORKERS = [8, 64]


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def llama(layers: int = 32, width: int = 1024, *, scanned: bool = False) -> dict[str, Any]:
    """A decoder like Llama's (Touvron et al., 2023) with grouped queries, 0.4 billion parameters.

    Args:
        layers: how many.
        width: of the residual stream.
        scanned: stack the layers along a leading axis, as `lax.scan` wants them.
    """
    inner = width * 8 // 3 // 64 * 64
    block = {
        "q": (width, width),
        "k": (width, width // 4),
        "v": (width, width // 4),
        "o": (width, width),
        "gate": (width, inner),
        "up": (width, inner),
        "down": (inner, width),
        "norm1": (width,),
        "norm2": (width,),
    }
    found: dict[str, Any] = {"embedding": _array(32_000, width), "norm": _array(width)}
    if scanned:
        return found | {name: _array(layers, *shape) for name, shape in block.items()}
    blocks = {name: _array(*shape) for name, shape in block.items()}
    return found | {f"block{number}": dict(blocks) for number in range(layers)}


def many(shapes: int) -> dict[str, Any]:
    """A leaf of each shape `(64 + i, 37)`."""
    return {f"leaf{number}": _array(64 + number, 37) for number in range(shapes)}


MODELS = {
    "ResNet-50": resnet50,
    "GPT-2": gpt2,
    "Llama, 32 layers": llama,
    "Llama, 32 layers, scanned": lambda: llama(scanned=True),
    "10 shapes": lambda: many(10),
    "100 shapes": lambda: many(100),
}


def recipes() -> dict[str, Any]:
    """The mean without a codec, then every recipe with its defaults."""
    parts = [text for text in catalogue.expressions() if text not in catalogue.VARIANTS]
    found = {text: eval(text, dict(inspect.getmembers(jaxcomp))) for text in parts}
    return {"dense": jaxcomp.Dense(), **{text.partition("(")[0]: found[text] for text in parts}}


def measure(method: Any, tree: Any, workers: int) -> dict[str, float]:
    """Seconds, and lines of StableHLO."""
    mesh = Mesh(jax.devices()[:workers], ("data",))
    tx = jaxcomp.compressed_mean(method, "data")
    jax.clear_caches()
    start = time.perf_counter()
    state = jax.eval_shape(lambda tree: jaxcomp.init_state(tx, tree, mesh, "data"), tree)
    found = {"init_state": time.perf_counter() - start}
    specs = jaxcomp.state_specs(state, "data")

    def update(grads: Any, state: Any) -> Any:
        local = jax.tree.map(lambda x: x[0], grads)
        return tx.update(local, state)

    step = jax.jit(
        jax.shard_map(update, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs))
    )
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct((workers, *x.shape), x.dtype), tree)
    start = time.perf_counter()
    lowered = step.lower(grads, state)
    found["lower"] = time.perf_counter() - start
    found["lines"] = lowered.as_text().count("\n")
    start = time.perf_counter()
    lowered.compile()
    found["compile"] = time.perf_counter() - start
    jax.clear_caches()
    start = time.perf_counter()
    if method != jaxcomp.Dense():
        jaxcomp.describe(method, tree, workers=workers)
    found["describe"] = time.perf_counter() - start
    return found


COLUMNS = (
    "model {model} | codec {codec} | workers {workers} | lower s {lower:.1f} | "
    "compile s {compile:.1f} | lines {lines:,} | init_state s {init_state:.1f} | "
    "describe s {describe:.1f}"
)


def main() -> None:
    choices = recipes()
    options = reporting.options(
        __doc__,
        reporting.RESULTS / "compile",
        model=(MODELS, "some of them"),
        codec=(choices, "some of them"),
        workers=(WORKERS, "simulated devices"),
    )
    cases = [(m, c, w) for m in options.model for c in options.codec for w in options.workers]
    found: list[dict[str, Any]] = []
    for model, codec, workers in track(cases, "Compiling"):
        row = {"model": model, "codec": codec, "workers": workers}
        found.append(row | measure(choices[codec], MODELS[model](), workers))
    title = "What a compressed mean takes to compile"
    reporting.show(
        reporting.Table(title, COLUMNS, found), {"compile": found}, options.out / "compile.md"
    )


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_num_cpu_devices", max(WORKERS))
    main()
