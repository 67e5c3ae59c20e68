"""`jaxcomp plan`: a forecast for a model, a number of workers and a link."""

import argparse
import functools
import json
from typing import Any

import jax

import jaxcomp
from jaxcomp import expressions, tables
from jaxcomp.cli import files, output
from jaxcomp.planning import (
    budget,
    columns,
    experts,
    fsdp,
    kept,
    models,
    planner,
    plots,
    sites,
    timing,
)
from jaxcomp.planning.spending import Spending
from jaxcomp.theory import local_rounds
from jaxcomp.weights import forecasting


def plan(args: argparse.Namespace) -> None:
    """Prints a plan for a model, a number of workers and a link."""
    if args.weights is not None:
        _weights(args)
        return
    given = (args.params, args.model, args.tree, args.gradients)
    if args.experts:
        _experts(args)
        return
    if args.tokens or args.width:
        raise ValueError("--tokens and --width need --experts")
    if sum(one is not None for one in given) != 1:
        raise ValueError("`plan` needs exactly one of --params, --model, --tree and --gradients")
    _check_links(args)
    if args.plot is not None:
        plots.check(args.plot)  # Before minutes of timing.
    if args.upload and not args.sites:
        raise ValueError("--upload needs --sites: means take the same time in both directions")
    if args.second_copy and not (args.fsdp and args.fast_link):
        raise ValueError("--second-copy needs --fsdp and --fast-link")
    if args.fsdp or args.sites:
        (_sharded if args.fsdp else _between_sites)(args)
        return
    codecs = None
    if args.codec is not None:
        codecs = {text: _way(text, expressions.evaluate(text)) for text in args.codec}
    like, spent = _like(args), None
    if args.budget is not None:
        spent, codecs = _spent(args, like, codecs)
    fast = args.fast_link and jaxcomp.planning.Network(args.fast_link, args.fast_latency)
    workers = args.workers if len(args.workers) > 1 else args.workers[0]
    planned = planner.plan(
        jax.eval_shape(lambda: like) if args.gradients else like,
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
        rounds=args.rounds,
        clock=None if args.link_only else _clock(args),
    )
    if args.plot is not None:
        plots.save(planned, args.plot)
    if args.rounds:
        planned = local_rounds.rounds(planned, stall=args.stall, longest=args.longest)
    if spent is None:
        _show(args, planned)
    elif args.json:
        both = {"budget": json.loads(spent.to_json()), "plan": json.loads(planned.to_json())}
        print(tables.to_json(both))
    else:
        print(spent, planned, sep="\n\n")


def _show(args: argparse.Namespace, planned: Any) -> None:
    output.clear()
    print(planned.to_json() if args.json else planned)


def _check_links(args: argparse.Namespace) -> None:
    if (len(args.workers) > 1) != (args.fast_link is not None):
        raise ValueError(
            "--fast-link and two numbers of --workers, as in 4x8, must be given together"
        )


def _experts(args: argparse.Namespace) -> None:
    """Prints the plan of the all-to-alls of a layer of experts."""
    others = ("params", "model", "tree", "gradients", "fsdp", "sites", "rounds", "budget")
    for name in (*others, "max_error", "backward", "plot"):
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} and --experts cannot be given together")
    if not args.tokens or not args.width or args.workers is None:
        raise ValueError(
            "--experts needs --workers, --tokens of a device and their --width, as in "
            "--workers 8 --tokens 8192 --width 4096"
        )
    _check_links(args)
    planned = experts.plan_experts(
        args.tokens,
        args.width,
        args.workers if len(args.workers) > 1 else args.workers[0],
        jaxcomp.planning.Network(args.link, args.latency),
        top=args.top,
        layers=args.layers,
        codecs=None if args.codec is None else _pairs(args.codec),
        compute=_step(args.step),
        fast=args.fast_link and jaxcomp.planning.Network(args.fast_link, args.fast_latency),
        link_per=args.link_per,
        link_only=args.link_only,
        clock=None if args.link_only else _clock(args),
    )
    _show(args, planned)


def _pairs(texts: list[str]) -> dict[str, Any]:
    """Codecs of both ways by their text, as in 'WEIGHTS / GRADIENTS'; one alone is for both."""
    found = {}
    for text in texts:
        one, _, other = text.partition(" / ")
        found[text] = (expressions.evaluate(one), expressions.evaluate(other or one))
    return found


def _weights(args: argparse.Namespace) -> None:
    """Prints the bytes of a patch of weights, and its seconds on the link."""
    others = ("params", "model", "tree", "gradients", "workers", "codec", "fsdp", "sites", "rounds")
    for name in (*others, "budget", "plot", "max_error"):
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} and --weights cannot be given together")
    if args.rate is None:
        raise ValueError("--weights needs a --rate, the learning rate, as in --rate 3e-6")
    network = jaxcomp.planning.Network(args.link, args.latency)
    found = forecasting.forecast(args.weights, network, rate=args.rate, rms=args.rms)
    if args.json:
        ways = [way._asdict() for way in found.ways]
        print(tables.to_json({"changed": found.changed, "one": found.one, "ways": ways}))
    else:
        print(found)


def _sharded(args: argparse.Namespace) -> None:
    """Prints the plan of a fully sharded model."""
    for name in ("rounds", "budget", "max_error"):
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} and --fsdp cannot be given together")
    planned = fsdp.plan_fsdp(
        _like(args),
        args.workers if len(args.workers) > 1 else args.workers[0],
        jaxcomp.planning.Network(args.link, args.latency),
        codecs=None if args.codec is None else _pairs(args.codec),
        gathers=args.gathers,
        second_copy=args.second_copy,
        compute=_step(args.step),
        backward=args.backward,
        overlap=args.overlap,
        fast=args.fast_link and jaxcomp.planning.Network(args.fast_link, args.fast_latency),
        link_per=args.link_per,
        link_only=args.link_only,
        clock=None if args.link_only else _clock(args),
    )
    if args.plot is not None:
        plots.save(planned, args.plot)
    _show(args, planned)


def _between_sites(args: argparse.Namespace) -> None:
    """Prints the plan of a round between sites."""
    for name in ("fsdp", "rounds", "budget", "max_error", "plot"):
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} and --sites cannot be given together")
    if args.codec is None or len(args.codec) > 1:
        raise ValueError(
            "--sites needs one --codec, such as 'chunk_top_k() / qsgd_inf(bits=8)': that of a "
            "site's message, and, behind a slash, of the server's"
        )
    up, _, down = args.codec[0].partition(" / ")
    planned = sites.plan_sites(
        _like(args),
        jaxcomp.planning.Network(args.link, args.latency),
        up=expressions.evaluate(up),
        down=expressions.evaluate(down) if down else None,
        upload=args.upload and jaxcomp.planning.Network(args.upload, args.latency),
        steps=args.every,
        step=_step(args.step),
    )
    _show(args, planned)


def _like(args: argparse.Namespace) -> Any:
    """The tree to plan for, or its number of parameters."""
    if args.gradients is None:
        if args.tree is None:
            return models.MODELS[args.model]() if args.model else args.params
        tree = expressions.import_named(args.tree)
        return jax.eval_shape(tree) if callable(tree) else tree
    if args.budget is None:
        raise ValueError("--gradients needs a --budget, as in --budget 400kB, to spend on them")
    return files.arrays(args.gradients[0])


def _spent(args: argparse.Namespace, gradient: Any, codecs: Any) -> tuple[Spending, dict[str, Any]]:
    """A budget spent on the gradients; and its policy and one codec for all leaves, to compare."""
    if args.gradients is None:
        raise ValueError("--budget needs --gradients, whose errors it measures for each codec")
    if len(args.workers) > 1:
        raise ValueError("--budget needs one number of --workers, since it is one link's bytes")
    more = [files.arrays(path) for path in args.gradients[1:]]
    ladder = budget.widths() if codecs is None else codecs
    spent = budget.spend(args.budget, gradient, *more, workers=args.workers[0], codecs=ladder)
    found: dict[str, Any] = {f"budget of {args.budget:,} bytes": spent.policy}
    if spent.uniform is not None:
        found[spent.uniform.name] = ladder[spent.uniform.name]
    return spent, found


def _way(text: str, given: Any) -> Any:
    wanted = jaxcomp.Codec | jaxcomp.Link | jaxcomp.Policy | jaxcomp.Reducer
    if not isinstance(given, wanted):
        raise ValueError(f"{text!r} must be a codec, a link, a policy or a reducer, got {given!r}")
    return given


def _step(given: float | str) -> float:
    """Seconds of a step without communication: the given ones, or those of a function."""
    if not isinstance(given, str):
        return given
    run = expressions.import_named(given)
    if not callable(run):
        raise ValueError(f"--step {given} must be a function without arguments, got {run!r}")
    return min(timing.times(lambda: jax.block_until_ready(run())))


def _clock(args: argparse.Namespace) -> kept.Clock:
    """Times on this device, scaled to the target device's memory bandwidth."""

    elements = args.elements or kept.ELEMENTS
    known: dict[Any, timing.Measured] = {}

    def here(way: Any) -> timing.Measured:
        if way in known:
            return known[way]
        exact = args.exact or args.elements or args.repeats
        if exact or kept.needs_timing(way):
            name = columns.short(getattr(way, "codec", way))
            output.progress(f"timing {name} on this machine", lines=True)
        took = kept.exact(way, elements, repeats=args.repeats or 7) if exact else kept.measure(way)
        known[way] = took
        return took

    if args.device_bandwidth is None:
        return here
    exact = args.exact or args.elements or args.repeats

    def there(way: Any) -> timing.Measured:
        known = None if exact else kept.scaled(way, args.device_bandwidth)
        # A copy reads and writes four bytes an element.
        own = 8 / copy(elements) if known is None else 0.0
        return known or here(way).faster(args.device_bandwidth / own)

    copy = functools.cache(timing.copy)
    return there
