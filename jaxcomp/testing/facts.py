"""Checks of what a codec declares about its numbers and its hooks."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.base import Codec
from jaxcomp.layout import batches as batches_, trees
from jaxcomp.numerics import noise
from jaxcomp.reducers.psum import Psum
from jaxcomp.testing import bias, programs, reducer
from jaxcomp.testing.programs import SEED
from jaxcomp.types import Array


def assert_within_bounds(codec: Codec, x: Array) -> None:
    """Checks `variance_bound` and `worst` on inputs whose elements differ in size.

    The mean of `‖roundtrip(x) − x‖² / ‖x‖²` over keys must be at most `ω`, within six standard
    errors, and no element may be off by more than `worst` times the largest of its bucket.

    Args:
        codec: the codec.
        x: `[n]`, of moderate size, such as `gaussian(700)`.

    Raises:
        AssertionError: naming the bound, the input and the measured error.
    """
    worst, (batch,) = codec.facts.worst, trees.layout(codec, x).batches
    omega = codec.variance_bound(batch.size) if codec.unbiased else None
    if omega is None and worst is None:
        return
    sizes = jnp.sign(x) * jnp.exp(-8 * jnp.abs(jnp.sin(jnp.arange(x.size, dtype=jnp.float32))))
    for name, row in {"x": x, "sizes from 1 to e⁻⁸": sizes, **bias.inputs(x.size)}.items():
        rows = jnp.broadcast_to(row, (programs.MANY, x.size))
        off = np.asarray(programs.many(codec, programs.keys(), rows)[1] - row, np.float64)
        ratios = (off**2).sum(1) / np.sum(np.asarray(row, np.float64) ** 2)
        error = 6 * ratios.std() / np.sqrt(len(ratios))
        if omega is not None and ratios.mean() - error > omega * (1 + 1e-6):
            raise AssertionError(
                f"{codec!r} declares variance_bound({batch.size}) = {omega:.4g}, but its error on "
                f"{name} has {ratios.mean():.4g} ± {error:.2g} of the input's energy"
            )
        if worst is None:
            continue
        tops = np.abs(np.asarray(trees.stack(batch, [row]))).max(1)
        errors = np.stack([np.asarray(trees.stack(batch, [y])) for y in off.astype(np.float32)])
        allowed = worst * tops * (1 + 1e-5)
        if (np.abs(errors).max(2) > allowed).any():
            ratio = (np.abs(errors).max(2) / np.maximum(tops, np.finfo(np.float32).tiny)).max()
            raise AssertionError(
                f"{codec!r} declares worst={worst:.4g}, but an element of {name} is off by "
                f"{ratio:.4g} of the largest element of its bucket"
            )


def assert_keeps_state(codec: Codec, x: Array) -> None:
    """Checks that the state keeps structure, shapes and dtypes, so that a loop can carry it.

    Raises:
        AssertionError: with both states.
    """
    for batch in trees.layout(codec, x).batches:
        start = jax.eval_shape(lambda batch=batch: batch.codec.init(batch.like))
        if codec.facts.agrees or codec.facts.guided:
            continue  # What the workers agree on, and guesses, are the state of one step.

        def encode(state, batch=batch):
            key = batches_.batch_key(noise.raw(SEED), 0, 0)
            rows = jnp.zeros(batch.like.shape, batch.like.dtype)
            return batch.codec.encode(key, rows, batch.counts(), state)[1]

        after = jax.eval_shape(encode, start)
        if _shapes(after) != _shapes(start):
            raise AssertionError(
                f"{codec!r} must keep its state's structure, shapes and dtypes: from "
                f"{_shapes(start)} to {_shapes(after)}"
            )


def assert_adds_up(codec: Codec) -> None:
    """Checks that payloads may be summed, and the arrays of `side` scaled, as the codec declares.

    The mean that `jaxcomp.Psum` decodes from the sum of four payloads must be that of the decoded
    messages.

    Raises:
        AssertionError: with the error of the mean.
    """
    try:
        summed = codec.summable(4)
    except ValueError:
        return
    if not summed.linear:
        raise AssertionError(f"{codec!r}.summable must return a codec with linear=True")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of a biased codec without feedback.
            reducer.check_law(Psum(codec))
    except AssertionError as error:
        raise AssertionError(
            f"{codec!r} must be linear, decode(Σ payloads) = Σ decode(payloads), as it declares: "
            f"{error}"
        ) from None


def assert_spans(codec: Codec) -> None:
    """Checks that elements down to `1 / span` of the largest decode to less than twice their size.

    Raises:
        AssertionError: with the largest relative error.
    """
    span = codec.facts.span
    if not span:
        return
    ratio = max(1 / span, 2.0**-60)
    x = jnp.asarray(np.geomspace(1, ratio * 1.001, 100) * (-1) ** np.arange(100), jnp.float32)
    y = np.asarray(programs.compiled(codec, noise.raw(SEED), x)[1], np.float64)
    off = np.abs(y / np.asarray(x, np.float64) - 1).max()
    if not off < 1:
        raise AssertionError(
            f"{codec!r} declares span={span:.4g}, but an element within it is off by {off:.4g} of "
            "itself"
        )


def assert_reads_guesses(codec: Codec, x: Array) -> None:
    """Checks that guesses of zero are the same as none, if the codec takes guesses.

    Raises:
        AssertionError: if it decodes to another batch.
    """
    if not codec.facts.guided:
        return
    for batch in trees.layout(codec, x).batches:
        key, rows = batches_.batch_key(noise.raw(SEED), 0, 0), trees.stack(batch, [x])
        guesses = jnp.zeros((2, *rows.shape), jnp.float32)

        def run(state, batch=batch, key=key, rows=rows):
            payload, _ = batch.codec.encode(key, rows, batch.counts(), state)
            return batch.codec.decode(key, payload, batch.like, batch.codec.side(state))

        without, given = (np.asarray(jax.jit(run)(state)) for state in ((), guesses))
        if not np.allclose(without, given, rtol=1e-5, atol=1e-6):
            raise AssertionError(
                f"{codec!r} declares guided=True, so guesses of zero must be as none, but they "
                f"change what is decoded by {np.abs(without - given).max():.4g}"
            )


def assert_counts_clipped(codec: Codec, x: Array) -> None:
    """Checks that `clipped` counts at most the elements that there are, and none without `clips`.

    Raises:
        AssertionError: with the counts.
    """
    for batch in trees.layout(codec, x).batches:
        key, rows = batches_.batch_key(noise.raw(SEED), 0, 0), trees.stack(batch, [x])
        found = np.asarray(batch.codec.clipped(key, rows, batch.counts()))
        beyond, all_of_it = found.reshape(len(rows), 2).T
        sound = (beyond >= 0) & (beyond <= all_of_it)
        if not sound.all() or (beyond.any() and not codec.facts.clips):
            raise AssertionError(
                f"{codec!r} with clips={codec.facts.clips} counts {beyond} clipped elements of "
                f"{all_of_it} in each bucket"
            )


def assert_names_senders(codec: Codec, x: Array) -> None:
    """Checks that `mean_of_senders` is the mean over the workers that sent an element.

    It is checked in the elements that the codec sends: those of a transform cannot be told from
    decoded zeros.

    Raises:
        AssertionError: with the largest difference.
    """
    if not codec.facts.names_senders or codec.facts.reorders:
        return
    for batch in trees.layout(codec, x).batches:
        inputs = [trees.stack(batch, [row]) for row in (x, jnp.flip(x), -3 * jnp.roll(x, 50))]
        keys = [batches_.batch_key(noise.raw(SEED), 0, i) for i in range(len(inputs))]
        found = [
            batch.codec.encode(key, rows, batch.counts(), batch.codec.init(batch.like))[0]
            for key, rows in zip(keys, inputs, strict=True)
        ]
        decoded = np.stack(
            [
                np.asarray(batch.codec.decode(key, payload, batch.like))
                for key, payload in zip(keys, found, strict=True)
            ]
        )
        weights = np.array([1.0, 2.0, 0.5], np.float32)
        sent = weights[:, None, None] * (decoded != 0)
        want = (sent * decoded).sum(0) / np.maximum(sent.sum(0), 1e-9)
        everyone = keys[0]._replace(own=jnp.stack([key.own for key in keys]))
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)
        mean = functools.partial(batch.codec.mean_of_senders, everyone, stacked, batch.like)
        got = np.asarray(mean(jnp.asarray(weights)))
        if not np.allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max()):
            raise AssertionError(
                f"mean_of_senders of {codec!r} must be the mean over those that sent an element, "
                f"and is off by {np.abs(got - want).max():.4g}"
            )


def _shapes(tree: object) -> object:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(x.shape, jnp.dtype(x.dtype).name) for x in leaves]
