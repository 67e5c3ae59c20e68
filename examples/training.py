"""Shared code of the training examples: the step, its cost and the result of a run."""

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import optax
import options
import report
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcomp

AXIS = "data"


class Ready(NamedTuple):
    """A run before its first step.

    Attributes:
        sent: bytes of a step by kind of collective, as the compiled program has them.
        phases: the step that each phase of the method starts at, and the bytes of its steps.
    """

    params: Any
    state: Any
    step: Callable[..., Any]
    sent: dict[str, int]
    phases: list[tuple[int, int]]
    dense_bytes: int
    bits_per_element: float


def make_mesh(devices: Sequence[Any]) -> Mesh:
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def loss_of(model: nn.Module, params: Any, batch: Any) -> jax.Array:
    inputs, targets = batch
    logits: Any = model.apply(params, inputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def build_step(
    model: nn.Module, tx: optax.GradientTransformationExtraArgs, mesh: Mesh
) -> Callable[..., Any]:
    """A data-parallel training step: what differs from a dense one is inside `tx`."""

    def step(params, state, batch):
        value_and_grad = jax.value_and_grad(loss_of, argnums=1)
        loss, grads = value_and_grad(model, jaxcomp.local(params, AXIS), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, AXIS)

    return jaxcomp.data_parallel(step, mesh, AXIS, donate_argnums=(0, 1))


def prepare(
    name: str,
    args: argparse.Namespace,
    mesh: Mesh,
    *,
    model: nn.Module,
    rate: optax.Schedule,
    batch: tuple[Any, Any],
) -> Ready:
    """Initial parameters and state, the compiled step, and what is read off it.

    Args:
        name: which of `options.METHODS`.
        args: the options.
        mesh: the workers.
        model: a flax module from inputs to logits.
        rate: the learning rate by step.
        batch: the first one, inputs and targets.
    """
    method = options.METHODS[name]
    optimizer = method.optimizer or options.OPTIMIZERS[args.optimizer]
    times = method.learning_rate(args) / args.learning_rate
    tx = optax.chain(
        jaxcomp.compressed_mean(method.mean, AXIS, key=args.seed),
        optimizer(lambda step: times * rate(step)),
    )
    init = jax.jit(model.init, out_shardings=NamedSharding(mesh, PartitionSpec()))
    params: Any = init(jax.random.key(args.seed), batch[0][:1])
    state = jaxcomp.init_state(tx, params, mesh, AXIS)
    step = build_step(model, tx, mesh).lower(params, state, put(batch, mesh)).compile()
    sent, phases = sent_by(method.mean, step, params, mesh.size)
    return Ready(
        params=params,
        state=state,
        step=step,
        sent=sent,
        phases=phases,
        dense_bytes=jaxcomp.wire_bytes(jaxcomp.Dense(), params, workers=mesh.size),
        bits_per_element=jaxcomp.describe(method.mean, params).bits_per_element,
    )


def sent_by(
    mean: Any, step: Any, params: Any, workers: int
) -> tuple[dict[str, int], list[tuple[int, int]]]:
    """Bytes of a step by kind of collective, and by phase.

    A program with several phases has the collectives of all of them, of which a step runs one.
    """
    if not isinstance(mean, jaxcomp.ReducerSchedule):
        sent = jaxcomp.collective_bytes(step)  # The bytes of this compiled program.
        return sent, [(0, sum(sent.values()))]
    phases = [
        (start, jaxcomp.wire_bytes(reducer, params, workers)) for start, reducer in mean.phases
    ]
    return {"last phase": phases[-1][1]}, phases


def put(batch: Any, mesh: Mesh) -> Any:
    """A batch on the mesh, split over the workers; each process gives the rows of its own."""
    split = NamedSharding(mesh, PartitionSpec(AXIS))
    return jax.make_array_from_process_local_data(split, batch)


def first_copy(params: Any) -> Any:
    """The parameters as the first worker has them; all have the same."""
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), params)


def summary(
    name: str, ready: Ready, curve: Sequence[report.Point], times: Sequence[float]
) -> report.Run:
    """What a run came to, after as many steps as there are times, in seconds."""
    sent = [size for start, size in ready.phases if start < len(times)][-1]
    return report.Run(
        name=name,
        label=options.label(name),
        score=curve[-1].score,
        bytes_per_step=sent,
        bytes_by_collective=ready.sent,
        times_less_than_dense=ready.dense_bytes / sent,
        bits_per_element=ready.bits_per_element,
        step_ms=1e3 * statistics.median(times),
        sent_mb=report.sent(ready.phases, len(times)) / 1e6,
        phases=ready.phases,
        curve=list(curve),
    )
