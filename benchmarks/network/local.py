"""A worker that trains the byte model in rounds of local steps until it reaches a target score.

Beside the best ways that exchange in every step (those of `train.py`): the same model, seeds,
batches, clock and target. Each method has rates of its own, tuned on this task.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import byte_lm_model  # pyright: ignore[reportMissingImports]
import group
import jax
import optax
import train
import training  # pyright: ignore[reportMissingImports]
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcomp
from jaxcomp import algorithms

AXIS = group.AXIS
IN_EVERY_STEP = ("dense", "PowerSGD rank 4")


class Way(NamedTuple):
    """A way to train.

    Attributes:
        tx: the transformation.
        steps: at most so many.
        every: the steps of a round, after which the score is taken.
        rounds: whether the last step of each `every` exchanges, and no other: then the others are a
            program without collectives.
        overlapped: whether exchanges run beside the steps.
    """

    tx: optax.GradientTransformation
    steps: int
    every: int
    rounds: bool = True
    overlapped: bool = False


def rate(peak: float, steps: int) -> optax.Schedule:
    """Up in 20 steps, then down to a twentieth."""
    return optax.warmup_cosine_decay_schedule(0.0, peak, 20, steps, peak / 20)


def adam(peak: float, steps: int) -> optax.GradientTransformation:
    return optax.adam(rate(peak, steps))


def muon(peak: float, steps: int) -> optax.GradientTransformation:
    """Muon for the matrices of the blocks, Adam for the rest."""

    def numbers(params: Any) -> Any:
        inside = optax.contrib.MuonDimensionNumbers()
        return jax.tree_util.tree_map_with_path(
            lambda path, x: inside if "block" in str(path) and x.ndim == 2 else None, params
        )

    return optax.contrib.muon(
        rate(peak, steps),
        beta=0.9,
        adam_learning_rate=rate(1e-3, steps),
        muon_weight_dimension_numbers=numbers,
    )


def _anew(number: Any) -> Any:
    """The rates at which FedPAQ and GenQSGD were measured: from 0 to 0.105, anew in each round."""
    return rate(0.3, 300)(number % 8)


CHUNKED = jaxcomp.Policy(jaxcomp.chunk_top_k(160, 10_240), min_size=0, min_ndim=0)
"""Of all leaves, also norms; chunks divide every matrix of the model."""
FOUR_BITS = jaxcomp.Link(jaxcomp.qsgd_inf(bits=4))
TWO_SHOT = jaxcomp.TwoShot(FOUR_BITS, FOUR_BITS)
DENSE = jaxcomp.Dense()


def _streaming(**settings: Any) -> Way:
    codec = jaxcomp.natural_dithering(bits=4)
    make = functools.partial(algorithms.streaming_diloco, codec, AXIS, inner=adam(1e-3, 300))
    return Way(make(every=40, delay=5), steps=300, every=40, rounds=False, **settings)


METHODS: dict[str, Callable[[], Way]] = {
    "local SGD, 4-bit": lambda: Way(
        algorithms.local_sgd(TWO_SHOT, AXIS, learning_rate=rate(0.03, 300), momentum=0.9, every=8),
        steps=300,
        every=8,
    ),
    "post-local SGD, 4-bit": lambda: Way(
        algorithms.post_local_sgd(
            TWO_SHOT, AXIS, learning_rate=rate(0.03, 300), momentum=0.9, synchronous=10, every=16
        ),
        steps=300,
        every=8,
        rounds=False,
    ),
    "ADPSGD, 4-bit": lambda: Way(
        algorithms.adpsgd(
            TWO_SHOT, AXIS, learning_rate=rate(0.03, 300), momentum=0.9, start=4, warmup=5
        ),
        steps=300,
        every=10,
        rounds=False,
    ),
    "FedPAQ, 4-bit": lambda: Way(
        algorithms.fedpaq(jaxcomp.qsgd(bits=4), AXIS, learning_rate=_anew, every=8),
        steps=300,
        every=8,
    ),
    "GenQSGD, 4-bit both ways": lambda: Way(
        algorithms.genqsgd(
            jaxcomp.qsgd(bits=4), AXIS, learning_rate=_anew, local_steps=(8, 8, 6, 6)
        ),
        steps=300,
        every=8,
    ),
    "DeMo": lambda: Way(
        optax.chain(
            algorithms.demo_sgd(AXIS, decay=0.99, policy=jaxcomp.demo()),
            optax.sgd(rate(0.001, 200)),
        ),
        steps=200,
        every=5,
        rounds=False,
    ),
    "DeMo, subtracting the mean": lambda: Way(
        optax.chain(
            algorithms.demo_sgd(AXIS, decay=0.99, subtract="aggregate", policy=jaxcomp.demo()),
            optax.sgd(rate(0.001, 200)),
        ),
        steps=200,
        every=5,
        rounds=False,
    ),
    "DiLoCo, dense": lambda: Way(
        algorithms.diloco(DENSE, AXIS, every=30, inner=adam(1e-3, 420)), steps=420, every=30
    ),
    "DiLoCo, 4-bit two shots": lambda: Way(
        algorithms.diloco(TWO_SHOT, AXIS, every=30, inner=adam(1e-3, 420)), steps=420, every=30
    ),
    "streaming DiLoCo, 4-bit": _streaming,
    "streaming DiLoCo, 4-bit, beside the steps": lambda: _streaming(overlapped=True),
    "MuLoCo, 2-bit": lambda: Way(
        algorithms.muloco(
            jaxcomp.blockwise(bits=2), AXIS, learning_rate=0.02, every=30, inner=muon(0.02, 180)
        ),
        steps=180,
        every=30,
    ),
    "SparseLoCo": lambda: Way(
        algorithms.sparseloco(CHUNKED, AXIS, every=60, inner=adam(2e-3, 480), learning_rate=3.0),
        steps=480,
        every=60,
    ),
    "SparseLoCo with Muon": lambda: Way(
        algorithms.sparseloco(CHUNKED, AXIS, every=30, inner=muon(0.02, 210), learning_rate=3.0),
        steps=240,
        every=30,
    ),
}
"""Each is made when it is chosen: muon asks for shapes."""


def run(
    way: Way, data: tuple, own: dict[str, Any], mesh: Mesh, meet: Callable[..., float]
) -> dict[str, Any]:
    draw, held_out = data
    model = byte_lm_model.ByteModel(train.LAYERS, train.WIDTH)
    replicated = NamedSharding(mesh, PartitionSpec())
    tokens = draw(1, train.SEED)[0][:1]
    init = jax.jit(lambda seed: model.init(jax.random.key(seed), tokens), out_shardings=replicated)
    value_and_grad = jax.value_and_grad(functools.partial(training.loss_of, model))
    held: list[Any] = []

    def start(seed: int) -> None:
        params: Any = init(seed)
        held[:] = params, jaxcomp.init_state(way.tx, params, mesh, AXIS)

    def lay(number: int, seed: int) -> tuple:
        return tuple(group.spread(mesh, half) for half in draw(number, seed))

    def score() -> float:
        params = training.first_copy(held[0])
        return float(byte_lm_model.bits_per_byte(model, params, held_out))

    start(train.SEED)
    alone, last, sent = programs(way, value_and_grad, mesh, held, lay(1, train.SEED))

    def step(seed: int, number: int) -> None:
        program = last if number % way.every == 0 else alone
        *held[:], loss = program(*held, lay(number, seed))
        jax.block_until_ready((held[0], loss))

    def begin(seed: int) -> tuple[Callable[[int], Any], Callable[[], float]]:
        start(seed)
        return functools.partial(step, seed), score

    if way.overlapped:  # Its programs are compiled as they are needed.
        for number in range(1, way.every + 1):
            step(train.SEED, number)
    asked = {**own, "steps": way.steps, "every": way.every}
    found = train.races(begin, asked, meet)
    return {"parameters": train.parameters(), "collective_bytes": sent, **found}


def programs(
    way: Way, value_and_grad: Any, mesh: Mesh, held: list[Any], batch: tuple
) -> tuple[Any, Any, dict[str, int]]:
    """A step inside of a round, the last one of a round, and the bytes of its collectives."""
    if way.overlapped:
        both = jaxcomp.Overlapped(way.tx, value_and_grad, mesh, AXIS)
        return both, both, {}

    def compiled(**settings: Any) -> Any:
        def step(params, state, batch):
            here = jaxcomp.local(jaxcomp.view(params, state), AXIS)
            loss, grads = value_and_grad(here, batch)
            updates, state = way.tx.update(grads, state, params, **settings)
            return optax.apply_updates(params, updates), state, jaxcomp.PerWorker.wrap(loss, "loss")

        mapped = jaxcomp.data_parallel(step, mesh, AXIS, donate_argnums=(0, 1))
        return mapped.lower(*held, batch).compile()

    if not way.rounds:
        both = compiled()
        return both, both, jaxcomp.collective_bytes(both)
    alone, last = compiled(exchange=False), compiled(exchange=True)
    if jaxcomp.collective_bytes(alone):
        raise AssertionError("a step without an exchange has collectives")
    return alone, last, jaxcomp.collective_bytes(last)


def main() -> None:
    # Only the first process would find its programs there; the others would come late, and the
    # first collective waits for half a minute.
    jax.config.update("jax_enable_compilation_cache", False)
    own = group.place()
    mesh = group.join(own, devices=2)
    meet, data = group.meeting(mesh), train.batches(own)
    found = {}
    for name in group.chosen(own, (*IN_EVERY_STEP, *METHODS)):
        if name in METHODS:
            found[name] = run(METHODS[name](), data, own, mesh, meet)
        else:
            found[name] = train.run(train.METHODS[name], data, own, mesh, meet)
        train.say(own, name, found[name]["curves"])
    group.finish(own, {"methods": found})


if __name__ == "__main__":
    main()
