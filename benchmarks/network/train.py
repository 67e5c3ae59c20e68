"""A worker that trains the byte model of the examples until it reaches a target score.

Each race has a seed of its own, of parameters and batches, the same for all methods. The clock runs
in steps alone: it stands still while the score is taken, to which each worker contributes windows
of its own, so that all know the same mean and stop at the same step.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import byte_lm  # pyright: ignore[reportMissingImports]
import byte_lm_model  # pyright: ignore[reportMissingImports]
import group
import jax
import numpy as np
import optax
import training  # pyright: ignore[reportMissingImports]
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcomp

LAYERS, WIDTH, CONTEXT, BATCH, RATE, SEED = 4, 320, 32, 4, 1e-3, 0
TWO_SHOT = jaxcomp.Link(jaxcomp.qsgd_inf(bits=4))
METHODS: dict[str, Any] = {
    "dense": jaxcomp.Dense(),
    "two shots, 4-bit": jaxcomp.TwoShot(TWO_SHOT, TWO_SHOT),
    "two shots, 4-bit, in 1 part": jaxcomp.TwoShot(TWO_SHOT, TWO_SHOT, collectives=1),
    "default for sign()": jaxcomp.sign(),
    "top_k 1 %": jaxcomp.top_k(fraction=0.01),
    "PowerSGD rank 4": jaxcomp.PowerIteration(rank=4),
}


def parameters() -> int:
    """The number of parameters of the model."""
    model, tokens = byte_lm_model.ByteModel(LAYERS, WIDTH), np.zeros((1, CONTEXT), np.int32)
    tree: Any = jax.eval_shape(model.init, jax.random.key(SEED), tokens)
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def part(rows: Any, own: dict[str, Any]) -> tuple:
    """This worker's rows of inputs and targets."""
    cut = np.array_split(np.arange(len(rows[0])), own["processes"])[own["rank"]]
    return tuple(half[cut] for half in rows)


def batches(own: dict[str, Any]) -> tuple[Callable[[int, int], tuple], tuple]:
    """This worker's rows of the batch of each step and seed, and of the held-out windows."""
    text = byte_lm_model.read_text()

    def draw(step: int, seed: int) -> tuple:
        whole = byte_lm_model.batch_of(text, step, size=BATCH, context=CONTEXT, seed=seed)
        return part(whole, own)

    return draw, part(byte_lm_model.validation_of(text, CONTEXT), own)


def races(
    begin: Callable[[int], tuple[Callable[[int], Any], Callable[[], float]]],
    own: dict[str, Any],
    meet: Callable[..., float],
) -> dict[str, Any]:
    """The curve of the race of each seed, in their order.

    Args:
        begin: goes to the start of a seed, and returns `step`, which takes the step of a number
            and waits for it, and `score`, of this worker's windows that are held out.
        own: the settings.
        meet: brings everyone's number to their mean.
    """
    curves = []
    for seed in range(SEED, SEED + own["repeats"]):
        step, score = begin(seed)
        score()  # Compiled before the clock starts, like the step.
        meet()
        curves.append(race(step, score, own, meet))
    return {"curves": curves}


def race(
    step: Callable[[int], Any],
    score: Callable[[], float],
    own: dict[str, Any],
    meet: Callable[..., float],
) -> list[list[float]]:
    """The curve of (step, seconds, bits a byte, bytes that this worker sent) up to the target."""
    seconds, sent, curve = 0.0, 0, []
    for number in range(1, own["steps"] + 1):
        before, start = group.sent(), time.perf_counter()
        step(number)
        seconds += time.perf_counter() - start
        sent += group.sent() - before
        if number % own["every"] == 0 or number == own["steps"]:
            curve.append([number, seconds, meet(score()), sent])
            if curve[-1][2] <= own["target"]:
                break
    return curve


def say(own: dict[str, Any], name: str, curves: list[list[list[float]]]) -> None:
    took = ", ".join(f"{curve[-1][1]:.1f}" for curve in curves)
    ends = ", ".join(f"{curve[-1][2]:.3f} after {curve[-1][0]}" for curve in curves)
    group.say(own, f"{took} s  {name}: bits a byte {ends} steps")


def run(
    method: Any, data: tuple, own: dict[str, Any], mesh: Mesh, meet: Callable[..., float]
) -> dict[str, Any]:
    draw, held_out = data
    model = byte_lm_model.ByteModel(LAYERS, WIDTH)
    rate = byte_lm.warm_and_decay(RATE, own["steps"])
    tx = optax.chain(jaxcomp.compressed_mean(method, group.AXIS, key=SEED), optax.adam(rate))
    replicated = NamedSharding(mesh, PartitionSpec())
    tokens = draw(1, SEED)[0][:1]
    init = jax.jit(lambda seed: model.init(jax.random.key(seed), tokens), out_shardings=replicated)
    held: list[Any] = []

    def start(seed: int) -> None:
        params: Any = init(seed)
        held[:] = params, jaxcomp.init_state(tx, params, mesh, group.AXIS)

    def lay(number: int, seed: int) -> tuple:
        return tuple(group.spread(mesh, half) for half in draw(number, seed))

    start(SEED)
    compiled = training.build_step(model, tx, mesh).lower(*held, lay(1, SEED)).compile()

    def step(seed: int, number: int) -> None:
        *held[:], loss = compiled(*held, lay(number, seed))
        jax.block_until_ready((held, loss))

    def score() -> float:
        return float(byte_lm_model.bits_per_byte(model, training.first_copy(held[0]), held_out))

    def begin(seed: int) -> tuple[Callable[[int], Any], Callable[[], float]]:
        start(seed)
        return functools.partial(step, seed), score

    return {
        "parameters": parameters(),
        "collective_bytes": jaxcomp.collective_bytes(compiled),
        **races(begin, own, meet),
    }


def main() -> None:
    own = group.place()
    mesh = group.join(own)
    meet, data = group.meeting(mesh), batches(own)
    found = {}
    for name in group.chosen(own, METHODS):
        found[name] = run(METHODS[name], data, own, mesh, meet)
        say(own, name, found[name]["curves"])
    group.finish(own, {"methods": found})


if __name__ == "__main__":
    main()
