"""Residuals in units of the gradient and of the step, under schedules: the table of the page."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.paths import ROOT

import jaxcomp

KEYS = jax.random.split(jax.random.key(0), 4)
PAGE = (ROOT / "docs" / "reducers.md").read_text()
CODECS = {"`sign()`": jaxcomp.sign(), "`top_k(0.01)`": jaxcomp.top_k(0.01)}


def predict(params, x):
    return jnp.tanh(x @ params["inner"]) @ params["outer"]


def drawn(inner, outer):
    shapes = (inner, (64, 128), 8), (outer, (128, 64), 11)
    made = [jax.random.normal(key, shape) / by for key, shape, by in shapes]
    return dict(zip(("inner", "outer"), made, strict=True))


def loss_fn(params, x):
    return jnp.mean((predict(params, x) - predict(drawn(*KEYS[2:]), x)) ** 2)


def cosine(steps):
    return optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 10, steps)


def last_loss(codec, schedule, steps, mesh, *, of_step=False):
    """The mean over the last 20 steps."""

    def rate(step):
        return jnp.maximum(schedule(step), 1e-6)

    parts = [jaxcomp.compressed_mean(codec, "data")]
    if of_step:
        back = optax.scale_by_schedule(lambda step: 1 / rate(step))
        parts = [optax.scale_by_schedule(rate), *parts, back]
    tx = optax.chain(*parts, optax.sgd(schedule, momentum=0.9))

    @functools.partial(jaxcomp.data_parallel, mesh=mesh, axis_name="data")
    def step(params, state, x):
        loss, grads = jaxcomp.value_and_grad(loss_fn, "data")(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = drawn(*KEYS[:2])
    state, losses = jaxcomp.init_state(tx, params, mesh, "data"), []
    for number in range(steps):
        x = jax.random.normal(jax.random.fold_in(KEYS[0], number), (256, 64))
        params, state, loss = step(params, state, x)
        losses.append(float(loss))
    return np.mean(losses[-20:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", re.findall(r"^\| (`\w+\(.*?\)`), ([\d,]+) steps \| (.*) \|$", PAGE, flags=re.MULTILINE)
)
def test_the_table_of_schedules(row, mesh):
    codec, steps, cells = row[0], int(row[1].replace(",", "")), row[2].split(" | ")
    ways = [(CODECS[codec], False), (CODECS[codec], True), (jaxcomp.Dense(), False)]
    for told, (used, of_step) in zip(cells, ways, strict=True):
        if told != "—":
            got = last_loss(used, cosine(steps), steps, mesh, of_step=of_step)
            np.testing.assert_allclose(got, float(told), rtol=0.05)


@pytest.mark.slow
def test_a_rate_that_falls_at_once(mesh):
    schedule, codec = optax.piecewise_constant_schedule(1.0, {200: 0.1}), jaxcomp.top_k(0.01)
    told = re.search(
        r"ends at ([\d.]+) in units of the gradient and at ([\d.]+) in", " ".join(PAGE.split())
    )
    assert told is not None
    for said, of_step in zip(told.groups(), (False, True), strict=True):
        got = last_loss(codec, schedule, 400, mesh, of_step=of_step)
        np.testing.assert_allclose(got, float(said), rtol=0.05)
