"""What to do where one bit an element diverges under AdamW: ways, rates, and where they end.

    python benchmarks/signs.py

A small transformer learns to tag tokens that are as rare as words are (Zipf's law): half of them
come up fewer than three times in a batch of 2,048. There are eight workers, a warm-up over a tenth
of the steps, and then a cosine. `sign` gives all elements of a bucket one magnitude, and AdamW
divides each element by its own root mean square, so that elements of small gradients move as fast
as the others. The loss is the mean of the last 20 steps; ln 16 = 2.77 is that of a guess.
"""

import argparse
import pathlib
import statistics
import sys
import warnings
from typing import Any

import jax
import numpy as np
import optax

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
import byte_lm_model
import training
from harness import WORKERS, environment

import jaxcomp

jax.config.update("jax_num_cpu_devices", WORKERS)

TOKENS, TAGS, CONTEXT, BATCH = 256, 16, 32, 64
OUT = pathlib.Path(__file__).parent / "results" / "convergence"
SIGN, FOUR, AXIS = jaxcomp.sign(), jaxcomp.blockwise(bits=4), training.AXIS


def adamw(codec: Any, **given: float) -> Any:
    settings: dict[str, Any] = {"b2": 0.98, "eps": 1e-9, "weight_decay": 0.1} | given

    def make(rate, steps):
        del steps
        return optax.chain(jaxcomp.compressed_mean(codec, AXIS), optax.adamw(rate, **settings))

    return make


def one_bit_adam(rate, steps):
    return jaxcomp.algorithms.one_bit_adam(
        jaxcomp.sign(), AXIS, learning_rate=rate, freeze_step=steps // 5, b2=0.98, weight_decay=0.1
    )


def cd_adam(codec):
    return lambda rate, steps: jaxcomp.algorithms.cd_adam(codec, AXIS, learning_rate=rate)


EMBEDDING_DENSE = jaxcomp.Policy(SIGN, rules=(jaxcomp.Rule("*embedding/kernel", None),))
WAYS = {
    "`Dense()`": (adamw(jaxcomp.Dense()), jaxcomp.Dense()),
    "`qsgd_inf(bits=4)`": (adamw(jaxcomp.qsgd_inf(bits=4)), jaxcomp.qsgd_inf(bits=4)),
    "`blockwise(bits=4)`": (adamw(FOUR), FOUR),
    "`eden(bits=2, rotations=2)`": (
        adamw(jaxcomp.eden(bits=2, rotations=2)),
        jaxcomp.eden(bits=2, rotations=2),
    ),
    "`eden(bits=1, rotations=2)`": (
        adamw(jaxcomp.eden(bits=1, rotations=2)),
        jaxcomp.eden(bits=1, rotations=2),
    ),
    "`PowerIteration(rank=4)`": (
        adamw(jaxcomp.PowerIteration(rank=4)),
        jaxcomp.PowerIteration(rank=4),
    ),
    "`one_bit_adam`, a fifth of the steps dense": (one_bit_adam, SIGN),
    "`cd_adam` of `blockwise(bits=4)`": (cd_adam(FOUR), FOUR),
    "`cd_adam` of `sign()`": (cd_adam(SIGN), SIGN),
    "`top_k(fraction=0.01)`": (adamw(jaxcomp.top_k(0.01)), jaxcomp.top_k(0.01)),
    "`sign()`": (adamw(SIGN), SIGN),
    "`sign()`, embedding dense": (adamw(EMBEDDING_DENSE), EMBEDDING_DENSE),
    "`sign(bucket_size=64)`": (adamw(jaxcomp.sign(64)), jaxcomp.sign(64)),
    "`sign()`, `b2=0.999`": (adamw(SIGN, b2=0.999), SIGN),
    "`sign()`, `eps=1e-4`": (adamw(SIGN, eps=1e-4), SIGN),
}
LOWER = ("`Dense()`", "`sign()`", "`cd_adam` of `sign()`")
"""Ways that are run at other rates too."""


def batch_of(rng: np.random.Generator, tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and tags that depend on each and the one before it."""
    chances = 1 / np.arange(1, TOKENS + 1)
    tokens = rng.choice(TOKENS, size=(BATCH, CONTEXT), p=chances / chances.sum())
    tags = (tables[tokens] + tables[np.roll(tokens, 1, axis=1)]) % TAGS
    return tokens.astype(np.int32), tags.astype(np.int32)


def run(way: str, rate: float, steps: int) -> float:
    """The loss in the end."""
    mesh, model = training.make_mesh(jax.devices()), byte_lm_model.ByteModel(layers=1, width=64)
    rng, tables = np.random.default_rng(0), np.random.default_rng(99).integers(TAGS, size=TOKENS)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps, rate / 10)
    tx = WAYS[way][0](schedule, steps)
    params = model.init(jax.random.key(0), batch_of(rng, tables)[0][:1])
    params = jaxcomp.place(params, mesh, AXIS)
    state = jaxcomp.init_state(tx, params, mesh, AXIS)
    step, losses = training.build_step(model, tx, mesh), []
    for _ in range(steps):
        batch = training.put(batch_of(rng, tables), mesh)
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return statistics.mean(losses[-20:])


def bits_of(way: str) -> float:
    """Of the leaves that are compressed and of those that are not, an element."""
    model = byte_lm_model.ByteModel(layers=1, width=64)
    like = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, CONTEXT), np.int32))
    return jaxcomp.describe(WAYS[way][1], like).bits_per_element


def main() -> None:
    parser = argparse.ArgumentParser(description="Where AdamW ends after compressed means.")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    todo = [(way, 1e-2) for way in WAYS] + [(way, rate) for way in LOWER for rate in (3e-3, 1e-3)]
    lines = []
    for way, rate in todo:
        loss = run(way, rate, args.steps)
        lines.append(f"| {way} | {bits_of(way):.2f} | {rate:g} | {loss:.3f} |")
        print(lines[-1], flush=True)
    said = ", ".join(f"{key} {value}" for key, value in environment().items())
    head = f"# A tagger of rare tokens under AdamW, {args.steps} steps\n\n{said}.\n\n"
    head += (__doc__ or "").split("\n\n")[2].rstrip()
    head += "\n\n| mean | bits | learning rate | loss |\n|---|---:|---:|---:|\n"
    (OUT / "signs.md").write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
