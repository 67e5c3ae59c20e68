"""A worker that measures how much of the exchanges of local updates runs beside the steps.

For each codec and delay: the time of a step without exchanges, of an exchange with nothing beside
it, and of a round with both, beside what `jaxcomp plan --rounds` would say. Then the score after
training with the delay, and without.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import byte_lm_model  # pyright: ignore[reportMissingImports]
import group
import jax
import local
import optax
import train
import training  # pyright: ignore[reportMissingImports]
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcomp
from jaxcomp.theory import local_rounds

AXIS = group.AXIS
STEPS = 240


class Case(NamedTuple):
    """What is exchanged, the steps of a round, the delay, and an idle time after each step.

    The steps of all processes take all cores of this machine, so what an exchange computes cannot
    run beside them. A step that ends with an idle time is like one of an accelerator: its host has
    little to do.
    """

    codec: str
    every: int
    delay: int
    idle: float = 0.0


CODECS: dict[str, Any] = {"dense": local.DENSE, "4-bit two shots": local.TWO_SHOT}
CASES = {
    "dense, 60 steps": Case("dense", 60, 40),
    "dense, 10 steps": Case("dense", 10, 8),
    "dense, 30 steps, idle hosts": Case("dense", 30, 12, idle=0.2),
    "4-bit, 30 steps": Case("4-bit two shots", 30, 8),
    "4-bit, 30 steps, idle hosts": Case("4-bit two shots", 30, 4, idle=0.2),
}


def transformation(case: Case) -> Any:
    """DiLoCo; with a delay, workers go on from between their own parameters and the centre."""
    return jaxcomp.local_updates(
        local.adam(1e-3, STEPS),
        optax.sgd(0.7, 0.9, nesterov=True),
        AXIS,
        every=case.every,
        delay=case.delay,
        mix=0.5 if case.delay else 0.0,
        reducer=CODECS[case.codec],
    )


class Bench:
    """The model, its data and the mesh."""

    def __init__(self, own: dict[str, Any], mesh: Mesh, meet: Callable[..., float]):
        self.own, self.mesh, self.meet = own, mesh, meet
        self.draw, self.held_out = train.batches(own)
        self.model = byte_lm_model.ByteModel(train.LAYERS, train.WIDTH)
        self.grads = jax.value_and_grad(functools.partial(training.loss_of, self.model))
        lies = NamedSharding(mesh, PartitionSpec())
        key, first = jax.random.key(train.SEED), self.draw(1, train.SEED)[0][:1]
        self.init: Any = jax.jit(lambda: self.model.init(key, first), out_shardings=lies)

    def lay(self, number: int) -> tuple:
        return tuple(group.spread(self.mesh, half) for half in self.draw(number, train.SEED))

    def score(self, params: Any) -> float:
        whole = training.first_copy(params)
        return self.meet(float(byte_lm_model.bits_per_byte(self.model, whole, self.held_out)))

    def beside(self, case: Case) -> dict[str, float]:
        """Training with exchanges beside the steps, and its times."""
        tx = transformation(case)
        params = self.init()
        state: Any = jaxcomp.init_state(tx, params, self.mesh, AXIS)
        took: list[float] = []
        with jaxcomp.Overlapped(tx, self.grads, self.mesh, AXIS) as run:
            for number in range(1, STEPS + 1):
                start = time.perf_counter()
                params, state, losses = run(params, state, self.lay(number))
                jax.block_until_ready((params, losses))
                time.sleep(case.idle)
                took.append(time.perf_counter() - start)
            bits = self.score(params)
            alone = self.alone(run, case, params, state)
        whole = [sum(took[at : at + case.every]) for at in range(0, STEPS, case.every)]
        return {"round": statistics.median(whole[1:]), "bits": bits, **alone}  # The first compiles.

    def alone(self, run: Any, case: Case, params: Any, state: Any) -> dict[str, float]:
        """Seconds of a step without an exchange, and of an exchange without steps."""
        steps: list[float] = []
        exchanges: list[float] = []
        taken = case.every - case.delay
        for number in range(3 * case.every):
            batch = self.lay(number)
            start = time.perf_counter()
            params, state, losses = run(params, state, batch)
            jax.block_until_ready((params, losses))
            time.sleep(case.idle)
            if state.waited and state.waited < taken:
                steps.append(time.perf_counter() - start)
            elif state.waited == taken:
                exchanges.append(state.pending[0].result().seconds)
        return {"step": statistics.fmean(steps), "exchange": statistics.median(exchanges)}

    def one_by_one(self, case: Case) -> float:
        """The score without a delay, by the same number of steps."""
        way = local.Way(transformation(case._replace(delay=0)), STEPS, case.every)
        held = [self.init()]
        held.append(jaxcomp.init_state(way.tx, held[0], self.mesh, AXIS))
        alone, last, _ = local.programs(way, self.grads, self.mesh, held, self.lay(1))
        for number in range(1, STEPS + 1):
            program = last if number % case.every == 0 else alone
            *held, _ = program(*held, self.lay(number))
        return self.score(held[0])


def main() -> None:
    # Only the first process would find its programs there; the others would come late, and the
    # first collective waits for half a minute.
    jax.config.update("jax_enable_compilation_cache", False)
    own = group.place()
    mesh = group.join(own, devices=2)
    bench = Bench(own, mesh, group.meeting(mesh))
    found = {}
    for name in group.chosen(own, CASES):
        case = CASES[name]
        one = {key: bench.meet(value) for key, value in bench.beside(case).items()}
        round_, step, exchange = (one[key] for key in ("round", "step", "exchange"))
        found[name] = {
            **case._asdict(),
            **one,
            "hidden": 1 - (round_ - case.every * step) / exchange,
            "predicted": local_rounds.seconds(case.every, step, exchange, case.delay),
            "bits_alone": bench.one_by_one(case),
        }
        group.say(own, f"{name}: {found[name]}")
    group.finish(own, {"methods": found})


if __name__ == "__main__":
    main()
