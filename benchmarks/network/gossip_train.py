"""A worker that trains a small byte model by gossip, or by means, until it reaches a target score.

As `train.py`, with smaller models, of which every worker has windows of its own, however many
workers there are. By gossip the score is that of the mean of all models, which is taken while the
clock stands still.
"""

import functools
from collections.abc import Callable
from typing import Any

import byte_lm_model  # pyright: ignore[reportMissingImports]
import gossiping
import group
import jax
import optax
import train
import training  # pyright: ignore[reportMissingImports]
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcomp
from jaxcomp import algorithms, graphs

CONTEXT, EACH, RATE, SEED = 32, 2, 2e-3, 0
MODELS = {"0.7 million": (2, 160), "0.08 million": (1, 64)}
"""Layers and width, by the number of parameters."""
AXIS = group.AXIS
FOUR, NEAREST = jaxcomp.qsgd_inf(bits=4), jaxcomp.blockwise(bits=4)


def adam() -> optax.GradientTransformation:
    return optax.adam(optax.warmup_constant_schedule(0.0, RATE, 10))


def averaged(reducer: Any) -> optax.GradientTransformation:
    return optax.chain(jaxcomp.compressed_mean(reducer, AXIS, key=SEED), adam())


def gossiped(make: Any, codec: Any, **settings: Any) -> Any:
    return make(codec, AXIS, learning_rate=RATE, inner=adam(), key=SEED, **settings)


def two_shots(delay: float | None) -> optax.GradientTransformation:
    return averaged(jaxcomp.TwoShot(train.TWO_SHOT, train.TWO_SHOT, delay=delay))


METHODS: dict[str, Callable[[float], Any]] = {
    # With `delay=0` XLA sends each leaf by itself, along a ring.
    "all-reduce, dense": lambda _: averaged(jaxcomp.Dense(delay=0.0)),
    "all-reduce, dense, one message": lambda _: optax.flatten(averaged(jaxcomp.Dense(delay=0.0))),
    "dense, at once": lambda delay: averaged(jaxcomp.Dense(delay=delay)),
    "dense, as it comes": lambda _: averaged(jaxcomp.Dense()),
    "two shots, 4-bit": two_shots,
    "two shots, 4-bit, as they come": lambda _: two_shots(None),
    "two shots, 4-bit, one after another": lambda _: two_shots(0.0),
    "D-PSGD on a ring, dense": lambda _: gossiped(algorithms.dpsgd, gossiping.DENSE),
    "CHOCO-SGD on a ring, 4-bit": lambda _: gossiped(algorithms.choco_sgd, FOUR, mixing=0.8),
    "DeepSqueeze, one peer, 4-bit": lambda _: gossiped(
        algorithms.deepsqueeze, NEAREST, mixing=0.8, graph=graphs.OnePeer()
    ),
}
"""Of the seconds of delay."""


def batches(own: dict[str, Any]) -> tuple[Callable[[int, int], tuple], tuple]:
    """This worker's rows of the batch of each step and seed, and the held-out windows."""
    text, size = byte_lm_model.read_text(), EACH * own["processes"]

    def draw(step: int, seed: int) -> tuple:
        whole = byte_lm_model.batch_of(text, step, size=size, context=CONTEXT, seed=seed)
        return train.part(whole, own)

    # The first ones: a score runs on 32 windows at once.
    held_out = byte_lm_model.validation_of(text, CONTEXT)
    return draw, tuple(half[:32] for half in held_out)


def run(
    tx: Any, data: tuple, own: dict[str, Any], mesh: Mesh, meet: Callable[..., float]
) -> dict[str, Any]:
    draw, held_out = data
    model = byte_lm_model.ByteModel(*MODELS[own["model"]])
    replicated = NamedSharding(mesh, PartitionSpec())
    tokens = draw(1, SEED)[0][:1]
    init = jax.jit(lambda seed: model.init(jax.random.key(seed), tokens), out_shardings=replicated)
    value_and_grad = jax.value_and_grad(functools.partial(training.loss_of, model))

    # `jaxcomp.consensus` in one message: behind a delay a score must not wait for each leaf.
    def consensus(params, state, batch):
        flat, back = ravel_pytree(jaxcomp.local(jaxcomp.view(params, state), AXIS))
        return back(jax.lax.pmean(flat, AXIS))

    mean = jaxcomp.data_parallel(consensus, mesh, AXIS)
    held: list[Any] = []

    def start(seed: int) -> None:
        params: Any = init(seed)
        held[:] = params, jaxcomp.init_state(tx, params, mesh, AXIS)

    def lay(number: int, seed: int) -> tuple:
        return tuple(group.spread(mesh, half) for half in draw(number, seed))

    def update(params, state, batch):
        here = jaxcomp.local(jaxcomp.view(params, state), AXIS)
        loss, grads = value_and_grad(here, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jaxcomp.PerWorker.wrap(loss, "loss")

    start(SEED)
    many = jaxcomp.data_parallel(update, mesh, AXIS, donate_argnums=(0, 1))
    compiled = many.lower(*held, lay(1, SEED)).compile()

    def step(seed: int, number: int) -> None:
        *held[:], loss = compiled(*held, lay(number, seed))
        jax.block_until_ready((held, loss))

    def score() -> float:
        params = training.first_copy(mean(*held, lay(1, SEED)))
        return float(byte_lm_model.bits_per_byte(model, params, held_out))

    def begin(seed: int) -> tuple[Callable[[int], Any], Callable[[], float]]:
        start(seed)
        return functools.partial(step, seed), score

    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(held[0])),
        "collective_bytes": jaxcomp.collective_bytes(compiled),
        **train.races(begin, own, meet),
    }


def main() -> None:
    # As in local.py: the cache would bring one process to its programs before all others.
    jax.config.update("jax_enable_compilation_cache", False)
    own = group.place()
    mesh = group.join(own)
    meet, data = group.meeting(mesh), batches(own)
    found = {}
    for name in group.chosen(own, METHODS):
        found[name] = run(METHODS[name](own["delay"]), data, own, mesh, meet)
        train.say(own, name, found[name]["curves"])
    group.finish(own, {"methods": found})


if __name__ == "__main__":
    main()
