"""`jaxcomp plan`: a forecast for a model, a number of workers and a link."""

import argparse
from typing import Any

import jax

import jaxcomp
from jaxcomp.cli import expressions, tables
from jaxcomp.planning import models, planner, plots, timing
from jaxcomp.theory import rounds as rounds_, units


def plan(args: argparse.Namespace) -> None:
    """Prints a plan for a model, a number of workers and a link."""
    if sum(given is not None for given in (args.params, args.model, args.tree)) != 1:
        raise ValueError("`plan` needs exactly one of --params, --model and --tree")
    if (len(args.workers) > 1) != (args.fast_link is not None):
        raise ValueError(
            "--fast-link and two numbers of --workers, as in 4x8, must be given together"
        )
    if args.plot is not None:
        plots.check(args.plot)  # Before minutes of timing.
    codecs = None
    if args.codec is not None:
        codecs = {text: _way(text, expressions.evaluate(text)) for text in args.codec}
    fast = args.fast_link and jaxcomp.planning.Network(args.fast_link, args.fast_latency)
    workers = args.workers if len(args.workers) > 1 else args.workers[0]
    like = models.MODELS[args.model]() if args.model else args.params or _tree(args.tree)
    planned = planner.plan(
        like,
        workers,
        jaxcomp.planning.Network(args.link, args.latency),
        codecs=codecs,
        compute=_step(args.step),
        backward=args.backward,
        overlap=args.overlap,
        every=args.every,
        fast=fast,
        link_per=args.link_per,
        link_only=args.link_only,
        max_error=args.max_error,
        clock=None if args.link_only else _clock(args),
    )
    if args.plot is not None:
        plots.save(planned, args.plot)
    if args.rounds:
        planned = rounds_.rounds(planned, stall=args.stall, longest=args.longest)
    print(planned.to_json() if args.json else planned)


def _way(text: str, given: Any) -> Any:
    wanted = jaxcomp.Codec | jaxcomp.Link | jaxcomp.Policy | jaxcomp.Reducer
    if not isinstance(given, wanted):
        raise ValueError(f"{text!r} must be a codec, a link, a policy or a reducer, got {given!r}")
    return given


def _tree(text: str) -> Any:
    """A tree of parameters or shapes; a function that returns one is not run."""
    found = expressions.named(text)
    return jax.eval_shape(found) if callable(found) else found


def _step(given: float | str) -> float:
    """Seconds of a step without communication: the given ones, or those of a function."""
    if not isinstance(given, str):
        return given
    run = expressions.named(given)
    if not callable(run):
        raise ValueError(f"--step {given} must be a function without arguments, got {run!r}")
    return min(timing.times(lambda: jax.block_until_ready(run())))


def _clock(args: argparse.Namespace) -> planner.Clock:
    """Measures on this device, and scales the times to the target device's memory bandwidth."""

    def here(way: Any) -> timing.Measured:
        took = timing.measure(way, args.elements, repeats=args.repeats)
        tables.progress(units.duration(took.whole))
        return took

    if args.device_bandwidth is None:
        return here
    own = 8 / timing.copy(args.elements)  # Bytes a second, reads plus writes.
    return lambda way: here(way).faster(args.device_bandwidth / own)
