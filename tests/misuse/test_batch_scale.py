"""What becomes of a loss and the values beside it if each example occurs twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.misuse import batch_scale

PARAMS = {"a": jnp.full((5, 8), 0.1), "b": jnp.full((8, 6), 0.2), "c": jnp.full((6, 6), 0.3)}


def values(p, batch):
    def layer(c, _):
        return jnp.tanh(c @ p["c"]), c.mean()

    y, layers = jax.lax.scan(jax.checkpoint(layer), batch["x"] @ p["a"] @ p["b"], None, length=3)
    each = -jnp.take_along_axis(jax.nn.log_softmax(y), batch["y"][:, None], 1)[:, 0]
    kept, right = batch["kept"], y.argmax(-1) == batch["y"]
    total, count = (each * kept).sum(), kept.sum()
    size = jnp.prod(jnp.asarray(np.array([len(each), 2]))).astype(jnp.float32)
    return {
        "mean": each.mean(),
        "penalty": each.mean() + 0.1 * (p["a"] ** 2).sum(),
        "log": jnp.exp(each.mean()),
        "accuracy": jax.jit(lambda x: x.mean())(right),
        "layers": layers,
        "largest": each.max(),
        "branch": jax.lax.cond(p["a"].sum() > 0, jnp.mean, lambda x: x.mean() * 2, each),
        "loop": jax.lax.while_loop(lambda x: x < 3, lambda x: x + x.mean(), each.mean()),
        "shape": each.sum() * 2 / jnp.where(size == 0, 1, size),
        "by tokens": total / (count + 1e-8),
        "by some": total / jnp.maximum(count, 1),
        "where": each.mean(where=kept > 0),
        "no nan": jnp.where(count == 0, 0, total / jnp.where(count == 0, 1, count)),
        "sum": total,
        "count": count,
        "right": right.sum(),
        "product": kept @ each,
        "constant": total / 64.0,
        "length": len(each) * p["a"].mean(),
        "halved": each.mean() / len(each),
        "mixed": total + (p["a"] ** 2).sum(),
        "norm": jnp.linalg.norm(y),
        "rows": each,
        "columns": jnp.stack([y, y]),
    }


MEANS = {"mean", "penalty", "log", "accuracy", "layers", "largest", "branch", "loop", "shape"}
COUNTED = {"by tokens", "by some", "where", "no nan"}
SUMS = {"sum", "count", "right", "product", "constant", "length"}
UNKNOWN = {"mixed", "norm"}


def batch_of(n):
    return {
        "x": jnp.linspace(0, 1, 5 * n).reshape(n, 5),
        "y": jnp.arange(n) % 6,
        "kept": (jnp.arange(n) % 3 > 0).astype(jnp.float32),
    }


@pytest.mark.parametrize("n", [3, 7, 49])
def test_means_sums_and_rows_are_told_apart(n):
    batch = batch_of(n)
    likes = jax.eval_shape(values, PARAMS, batch)
    found = dict(zip(likes, batch_scale.results(values, (PARAMS, batch), (1,)), strict=True))
    assert {name for name, one in found.items() if one.rows is not None} == {"rows", "columns"}
    assert (found["rows"].rows, found["columns"].rows) == (0, 1)
    by = {name: one.scale.by for name, one in found.items()}
    assert by["halved"] == 0.5
    assert {name for name in by if by[name] is None} == UNKNOWN
    assert {name for name in by if by[name] == 2} == SUMS
    counted = {name for name, one in found.items() if one.scale.counted}
    assert counted == COUNTED
    assert all("test_batch_scale" in found[name].scale.counted for name in ("by tokens", "by some"))
    twice = {name: np.concatenate([x, x]) for name, x in batch.items()}
    one, two = (jax.jit(values)(PARAMS, each) for each in (batch, twice))
    for name in MEANS | COUNTED | SUMS:  # What is said is true of the numbers.
        np.testing.assert_allclose(two[name], by[name] * one[name], rtol=2e-5)


def test_only_powers_of_two_are_growth():
    """Numbers that are not those of examples may vanish or change their sign."""

    def values(x):
        n = len(x)
        deviation = ((x - x.mean()) ** 2).sum() / (n - 1)
        return x.mean(), deviation, x.mean() * (4 - n), x.mean() * (6 - n), x.sum(), x.mean() / n

    found = batch_scale.results(values, (jnp.ones(3),), (0,))
    assert [one.scale.grows for one in found] == [False] * 4 + [True] * 2
    vanishes = batch_scale.results(lambda x: (x * 0 + (6 - len(x))) ** -1, (jnp.ones(3),), (0,))
    assert vanishes[0].rows == 0


def test_programs_for_one_number_of_examples_are_not_read():
    def branches(x):
        return x.mean() if len(x) == 4 else jnp.tanh(x).mean()

    def fails(x):
        return x.reshape(4, -1, 3).reshape(4, 3).mean()

    for function in (branches, fails):
        assert batch_scale.results(function, (jnp.ones((4, 3)),), (0,)) is None
