"""Compares remedies where one bit an element diverges under AdamW, by their final losses.

    python benchmarks/signs.py

A small transformer learns to tag tokens that are as rare as words are (Zipf's law): half of them
come up fewer than three times in a batch of 2,048. There are eight workers, a warm-up over a tenth
of the steps, and then a cosine. `sign` gives all elements of a bucket one magnitude, and AdamW
divides each element by its own root mean square, so that elements of small gradients move as fast
as the others. The loss is the mean of the last 20 steps; ln 16 = 2.77 is that of a guess.
"""

import statistics
import warnings
from collections.abc import Iterator
from typing import Any

import convergence
import jax
import numpy as np
import optax
import reporting
from rich.progress import track

import jaxcomp
from jaxcomp import algorithms

# isort: split
import byte_lm_model  # pyright: ignore[reportMissingImports]
import training  # pyright: ignore[reportMissingImports]

TOKENS, TAGS, CONTEXT, BATCH = 256, 16, 32, 64
SIGN, FOUR, AXIS = jaxcomp.sign(), jaxcomp.blockwise(bits=4), training.AXIS


def adamw(codec: Any, **given: float) -> Any:
    settings: dict[str, Any] = {"b2": 0.98, "eps": 1e-9, "weight_decay": 0.1} | given

    def make(rate, steps):
        del steps
        return optax.chain(jaxcomp.compressed_mean(codec, AXIS), optax.adamw(rate, **settings))

    return make


def one_bit_adam(rate, steps):
    settings: dict[str, Any] = {"freeze_step": steps // 5, "b2": 0.98, "weight_decay": 0.1}
    return optax.chain(algorithms.one_bit_adam(SIGN, AXIS, **settings), optax.sgd(rate))


def cd_adam(codec):
    return lambda rate, steps: optax.chain(algorithms.cd_adam(codec, AXIS), optax.sgd(rate))


EMBEDDING_DENSE = jaxcomp.Policy(SIGN, rules=(jaxcomp.Rule("*embedding/kernel", None),))
CODECS: dict[str, Any] = {
    "`Dense()`": jaxcomp.Dense(),
    "`qsgd_inf(bits=4)`": jaxcomp.qsgd_inf(bits=4),
    "`blockwise(bits=4)`": FOUR,
    "`eden(bits=2, rotations=2)`": jaxcomp.eden(bits=2, rotations=2),
    "`eden(bits=1, rotations=2)`": jaxcomp.eden(bits=1, rotations=2),
    "`PowerIteration(rank=4)`": jaxcomp.PowerIteration(rank=4),
}
WAYS = {
    **{name: (adamw(codec), codec) for name, codec in CODECS.items()},
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
"""Name to a function of the schedule and the steps, and the codec whose bits are counted."""
LOWER = ("`Dense()`", "`sign()`", "`cd_adam` of `sign()`")
"""Ways that are run at other rates too."""


def batch_of(rng: np.random.Generator, tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and tags that depend on each token and the previous one."""
    chances = 1 / np.arange(1, TOKENS + 1)
    tokens = rng.choice(TOKENS, size=(BATCH, CONTEXT), p=chances / chances.sum())
    tags = (tables[tokens] + tables[np.roll(tokens, 1, axis=1)]) % TAGS
    return tokens.astype(np.int32), tags.astype(np.int32)


def batches(steps: int, seed: int) -> Iterator[tuple]:
    rng, tables = np.random.default_rng(seed), np.random.default_rng(99).integers(TAGS, size=TOKENS)
    batch_of(rng, tables)
    yield from (batch_of(rng, tables) for _ in range(steps))


TASK = convergence.Task(byte_lm_model.ByteModel(layers=1, width=64), batches)


def bits_of(codec: Any) -> float:
    """Bits an element, of compressed and of dense leaves together."""
    like = jax.eval_shape(TASK.model.init, jax.random.key(0), np.zeros((1, CONTEXT), np.int32))
    return jaxcomp.describe(codec, like).bits_per_element


COLUMNS = "mean {mean} | bits {bits:.2f} | learning rate {rate:g} | loss {loss:.3f}"


def main() -> None:
    options = convergence.options(
        __doc__, steps=(300, "of each way"), ways=(WAYS, "some of them"), rates=([1e-2], "of all")
    )
    warnings.simplefilter("ignore", UserWarning)
    todo = [(way, rate) for way in options.ways for rate in options.rates]
    todo += [(way, rate) for way in options.ways if way in LOWER for rate in (3e-3, 1e-3)]
    records, steps = [], options.steps
    for way, rate in track(todo):
        make, codec = WAYS[way]
        warm = steps // 10
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warm, steps, rate / 10)
        losses = convergence.train(TASK, make(schedule, steps), steps).losses
        loss = statistics.mean(losses[-20:])
        records.append({"mean": way, "bits": bits_of(codec), "rate": rate, "loss": loss})
    title = f"A tagger of rare tokens under AdamW, {steps} steps"
    text = (__doc__ or "").split("\n\n")[2].rstrip()
    table = reporting.Table(title, COLUMNS, records)
    reporting.show(table, {"runs": records}, options.out / "signs.md", before=text)


if __name__ == "__main__":
    main()
