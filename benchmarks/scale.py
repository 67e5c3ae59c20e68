"""Trains a transformer of 85 million parameters with eight workers on one GPU, method by method.

    python benchmarks/scale.py --minutes 9

The text is 51 MB of Python, byte by byte (`scale_text.py`); the model computes in bfloat16 and has
float32 parameters. All methods have the same first parameters, batches, AdamW and learning rates;
MuLoCo's matrices have Muon, with its own rate, as its authors demand. Measured are the loss on
held-out files, tokens per second, bytes that a worker sends in a step, and memory.

The minutes are a limit on the whole call, compiling included: a method gets an equal part of what
is left, and what it does not use is for those after it. `results.json` in the `--out` folder is
written after each method. Called again, the program skips methods that have taken all `--steps`,
and runs those anew that the clock, an error or a kill ended earlier: nothing is saved to go on
from, since parameters and memory of eight workers are 10 to 20 GB.

One device does the work of eight: it encodes eight messages one after another, so that a method
whose codec is slow has fewer tokens per second than eight devices would have.
"""

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reporting  # It makes the examples importable, too.
import scale_methods as methods
import scale_plot
import scale_text
from scale_model import Model, fastest_attention

import byte_lm_model  # isort: skip  # pyright: ignore[reportMissingImports]

COLUMNS = (
    "method {name} | steps {steps} | bits per byte at {tokens} tokens {equal:.4f} | "
    "at its end {score:.4f} | tokens per second {tokens_per_second:,.0f} | "
    "bytes a worker and step {sent:,.0f} | peak memory, GB {peak_gb:.1f} | "
    "compile s {compile_s:.0f}"
)
AT_ONCE = 16
"""Windows of held-out text; there are `byte_lm_model.VALIDATION_WINDOWS`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One call: the data, the settings that decide a result, and the clock.

    Attributes:
        settings: of the model and the training.
        text: to train on, and held out.
        now: seconds.
        until: when the call must have ended.
        compiler: options of XLA.
    """

    settings: dict[str, Any]
    text: byte_lm_model.Text
    now: Callable[[], float]
    until: float
    compiler: dict[str, Any] | None = None

    @property
    def task(self) -> methods.Task:
        s = self.settings
        model = Model(s["layers"], s["width"], s["head"], s["attention"])
        return methods.Task(model, s["rate"], s["warm"], s["every"], s["seed"])

    @property
    def tokens(self) -> int:
        """Of a step."""
        return methods.WORKERS * self.settings["windows"] * self.settings["context"]

    def batch(self, step: int) -> methods.Batch:
        s = self.settings
        size, context = methods.WORKERS * s["windows"], s["context"]
        rows = byte_lm_model.batch_of(self.text, step, size=size, context=context, seed=s["seed"])
        shape = (methods.WORKERS, s["windows"], context)
        inputs, targets = (jnp.asarray(part.reshape(shape)) for part in rows)
        return inputs, targets

    def scorer(self) -> Callable[[Any], float]:
        """From parameters to the bits per byte of held-out text."""
        rows = byte_lm_model.validation_of(self.text, self.settings["context"])
        few = [part.reshape(-1, AT_ONCE, part.shape[-1]) for part in rows]
        loss = self.task.model.loss

        @jax.jit
        def mean(params: Any, inputs: Any, targets: Any) -> jax.Array:
            losses = jax.lax.map(lambda part: loss(params, *part), (inputs, targets))
            return losses.mean() / math.log(2)

        return lambda params: float(mean(params, *few))


class Trainer:
    """A method, compiled: `carried` is what its next step begins with."""

    def __init__(self, way: methods.Way, run: Run):
        self.way, self.every = way, run.settings["every"]
        started = run.now()
        self.carried = jax.jit(way.begin)(run.task.model.init(run.settings["seed"]))
        example = (self.carried, run.batch(1), np.int32(1))

        def compiled(step: Any) -> Any:
            return jax.jit(step, donate_argnums=0).lower(*example).compile(run.compiler)

        self.step = compiled(way.step)
        self.last = compiled(way.last) if way.last else self.step
        self.compile_s = run.now() - started

    def take(self, number: int, batch: methods.Batch) -> float:
        """The loss of a step, after it has ended."""
        run = self.step if number % self.every else self.last
        self.carried, loss = run(self.carried, batch, np.int32(number))
        return float(jax.block_until_ready((self.carried, loss))[1])

    def peak(self) -> int:
        """Bytes of the larger program: all that a step reads, writes and holds in between."""
        found = [program.memory_analysis() for program in (self.step, self.last)]
        return max(
            one.argument_size_in_bytes
            + one.output_size_in_bytes
            - one.alias_size_in_bytes
            + one.temp_size_in_bytes
            for one in found
        )


def train(name: str, run: Run, score: Callable[[Any], float], until: float) -> dict[str, Any]:
    """The record of a method, which ends after its steps, or before the time if that is earlier.

    A step is not begun if it and a score would take longer than is left, as long as the longest
    of each so far.
    """
    way, steps = methods.METHODS[name](run.task), run.settings["steps"]
    trainer = Trainer(way, run)
    curve: list[list[float]] = []
    times: list[float] = []
    scoring = 0.0

    def keep(number: int) -> float:
        started = run.now()
        bits = score(way.centre(trainer.carried))
        curve.append([number, number * run.tokens, number * way.sent, bits])
        say = f"{name}: step {number} of {steps}, {bits:.4f} bits per byte"
        print(f"{say}, {until - run.now():.0f} s left for it", flush=True)
        return run.now() - started

    keep(0)
    for number in range(1, steps + 1):
        if times and run.now() + max(times) + scoring > until:
            break
        batch, started = run.batch(number), run.now()
        trainer.take(number, batch)
        times.append(run.now() - started)
        if number % run.settings["every"] == 0 or number == steps:
            scoring = max(scoring, keep(number))
        if run.now() >= until:
            break
    if times and curve[-1][0] < len(times):
        keep(len(times))
    warm = times[run.settings["every"] :] or times[1:] or times  # After a round of every program.
    return {
        "curve": curve,
        "finished": len(times) == steps,
        "sent": way.sent,
        "seconds": sum(times),
        "tokens_per_second": run.tokens * len(warm) / sum(warm) if warm else None,
        "peak_bytes": trainer.peak(),
        "compile_s": trainer.compile_s,
    }


def measure(names: list[str], run: Run, done: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The records of all methods, known and new ones, after each of these that is not finished."""
    todo = [name for name in names if not done.get(name, {}).get("finished")]
    score = run.scorer()
    for place, name in enumerate(todo):
        left = run.until - run.now()
        if left <= 0:
            print(f"the time is over: {', '.join(todo[place:])} remain", flush=True)
            return
        try:
            found = train(name, run, score, run.now() + left / (len(todo) - place))
        except Exception as error:  # One that needs too much memory does not end the others.
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            found = {"finished": False, "curve": [], "error": str(error).partition("\n")[0]}
        done[name] = found
        yield done


def equal_steps(done: dict[str, Any]) -> int:
    """The largest number of steps at which every method that has begun was scored."""
    taken = [{int(point[0]) for point in one["curve"]} for one in done.values() if one["curve"]]
    return max(set.intersection(*taken), default=0) if taken else 0


def write(run: Run, done: dict[str, Any], out: pathlib.Path) -> None:
    """The table, the results as JSON and the picture."""
    step = equal_steps(done)
    records = [
        {
            **one,
            "name": name,
            "steps": int(one["curve"][-1][0]),
            "equal": next(point[3] for point in one["curve"] if point[0] == step),
            "score": one["curve"][-1][3],
            "peak_gb": one["peak_bytes"] / 1e9,
        }
        for name, one in done.items()
        if one["curve"]
    ]
    columns = COLUMNS.replace("{tokens}", f"{step * run.tokens:,}")
    settings = run.settings
    title = f"{settings['parameters']:,} parameters, {methods.WORKERS} workers on one device"
    results = {"settings": settings, "methods": done}
    reporting.show(reporting.Table(title, columns, records), results, out / "scale.md")
    scale_plot.plot(results, out / "scale.png")


def previous(out: pathlib.Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The records of an earlier call with the same settings."""
    path = out / "scale.json"
    if not path.is_file():
        return {}
    found = reporting.read(path)
    if found["settings"] != settings or found["environment"] != reporting.environment():
        raise SystemExit(
            f"{path} has results of other settings, text or environment: name another folder "
            "by --out, or delete it"
        )
    return found["methods"]


def main() -> None:
    start = time.monotonic()
    options = reporting.options(
        __doc__,
        "out/scale",
        methods=(methods.METHODS, "to train with"),
        minutes=(9.0, "of this call, over all methods that are not finished"),
        steps=(360, "of each method"),
        every=(30, "steps of a round, and from score to score"),
        layers=(12, "blocks of the model"),
        width=(768, "of its tokens, a multiple of --head and of eight"),
        head=(64, "elements of an attention head"),
        context=(512, "bytes that it sees"),
        windows=(8, "of each worker in a step"),
        rate=(1e-3, "peak learning rate of AdamW"),
        warm=(60, "steps until the peak"),
        seed=(0, "of parameters, batches and noise"),
    )
    text, differ = scale_text.read()
    for line in differ:
        print(f"other text: {line}")
    names = ("layers", "width", "head", "context", "windows", "steps", "every", "rate", "warm")
    settings = {name: getattr(options, name) for name in (*names, "seed")}
    model = Model(options.layers, options.width, options.head)
    attention = fastest_attention(methods.WORKERS, options.windows, options.context, model)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(model.shapes()))
    settings |= {"attention": attention, "text": text.digest, "parameters": parameters}
    until = start + 60 * options.minutes
    run = Run(settings=settings, text=text, now=time.monotonic, until=until)
    for done in measure(options.methods, run, previous(options.out, settings)):
        write(run, done, options.out)


if __name__ == "__main__":
    main()
