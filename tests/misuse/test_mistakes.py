"""A mistake in a step gives an error that names it, or the right result, in every mapping."""

import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.paths import ROOT
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxcomp

N = 8
PARAMS = {"w": jnp.full((4,), 0.5), "b": jnp.ones(())}
X = jax.random.normal(jax.random.key(0), (16, 4))
DENSE = jaxcomp.compressed_mean(jaxcomp.Dense(), "data")
SGD = optax.chain(DENSE, optax.sgd(0.1))


def predict(params, x):
    return jnp.tanh(x @ params["w"]) + params["b"] ** 2


def loss(params, x):
    return jnp.mean(predict(params, x) ** 2)


def pooled_loss(params, x):
    return jax.lax.pmean(loss(params, x), "data")


def plain(loss, params, x):
    return jax.grad(loss)(params, x)


def averaged(loss, params, x):
    return jax.lax.pmean(jax.grad(loss)(params, x), "data")


class Mistake(NamedTuple):
    """One mistake, and the words of the error by the way of mapping; None for the right result."""

    errors: dict[str, str | None]
    tx: Callable[[], optax.GradientTransformation] = lambda: SGD
    loss: Callable[..., Any] = loss
    grad: Callable[..., Any] = plain
    local: Callable[[], optax.GradientTransformation] = optax.identity


WAYS = ("vma", "no vma", "pmap", "data_parallel", "data_parallel, no vma")


def everywhere(text: str, **others: str | None) -> dict[str, str | None]:
    return dict.fromkeys(WAYS, text) | {k.replace("_", " "): v for k, v in others.items()}


def typed(text: str, otherwise: str | None) -> dict[str, str | None]:
    return {way: otherwise if "no" in way or way == "pmap" else text for way in WAYS}


POOLED = r"averaged over the workers of 'data' inside the differentiated function.*own loss"
LEFT_OVER = r"leave out the jax.lax.pmean"
LOCAL = r"before the mean.*jaxcomp.per_worker"


MISTAKES = {
    "mean of the loss": Mistake(typed(POOLED, None), loss=pooled_loss),
    "mean of the gradients": Mistake(
        typed(f"already the same on all workers.*value_and_grad.*{LEFT_OVER}", LEFT_OVER),
        grad=averaged,
    ),
    "momentum before": Mistake(
        everywhere(LOCAL, pmap=None),
        tx=lambda: optax.chain(optax.trace(0.9), SGD),
        local=lambda: optax.trace(0.9),
    ),
    "adam before": Mistake(
        everywhere(LOCAL, pmap=None),
        tx=lambda: optax.chain(optax.scale_by_adam(), SGD),
        local=optax.scale_by_adam,
    ),
    "apply_if_finite": Mistake(
        everywhere(r"optax.apply_if_finite must not wrap.*jaxcomp.skip_nonfinite"),
        tx=lambda: optax.apply_if_finite(SGD, 3),
    ),
    "MultiSteps": Mistake(
        everywhere(r"optax.MultiSteps must not wrap.*jaxcomp.accumulate"),
        tx=lambda: optax.MultiSteps(SGD, 2).gradient_transformation(),
    ),
    "conditionally_transform": Mistake(
        everywhere(r"optax.conditionally_transform must not wrap.*gate"),
        tx=lambda: optax.conditionally_transform(SGD, lambda step: step > 2),
    ),
    "conditionally_mask": Mistake(
        everywhere(r"optax.conditionally_mask must not wrap.*gate"),
        tx=lambda: optax.conditionally_mask(SGD, lambda step: step > 2),
    ),
}


def step_of(mistake: Mistake, tx):
    def step(params, state, x):
        own = jaxcomp.local(params, "data")
        grads = mistake.grad(mistake.loss, own, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def mapped(way: str, step, tx, mesh):
    """Two steps; an error is raised while the first is traced."""
    if way == "pmap":
        rows = X.reshape(N, -1, 4)
        run = jax.pmap(step, axis_name="data", in_axes=(0, 0, 0))
        params, state = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (N, *leaf.shape)), (PARAMS, tx.init(PARAMS))
        )
        for _ in range(2):
            params, state = run(params, state, rows)
        return jax.tree.map(lambda leaf: leaf[0], params)
    params, state = PARAMS, jaxcomp.init_state(tx, PARAMS, mesh, "data")
    if way.startswith("data_parallel"):
        run = jaxcomp.data_parallel(step, mesh, "data", check_vma="no" not in way)
    else:
        specs = jaxcomp.state_specs(state, "data")
        run = jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(P(), specs, P("data")),
                out_specs=(P(), specs),
                check_vma=way == "vma",
            )
        )
    for _ in range(2):
        params, state = run(params, state, X)
    return params


def reference(local):
    """SGD on the mean of what each worker makes of its gradient, without a mapped axis."""
    params, states = PARAMS, [local.init(PARAMS)] * N
    for _ in range(2):
        grads = [jax.grad(loss)(params, rows) for rows in X.reshape(N, -1, 4)]
        made, states = zip(
            *(local.update(g, s, params) for g, s in zip(grads, states, strict=True)), strict=True
        )
        params = jax.tree.map(lambda p, *us: p - 0.1 * sum(us) / N, params, *made)
    return params


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_or_the_right_result(name, way, mesh):
    mistake = MISTAKES[name]
    text = mistake.errors[way]
    if text is None:
        found = mapped(way, step_of(mistake, mistake.tx()), mistake.tx(), mesh)
        wanted = reference(mistake.local())
        for key, leaf in found.items():
            np.testing.assert_allclose(leaf, wanted[key], atol=1e-5, err_msg=key)
    else:
        with pytest.raises(ValueError, match=f"(?s){text}"):
            mapped(way, step_of(mistake, mistake.tx()), mistake.tx(), mesh)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "pmap"])
def test_an_optimizer_after_a_method_that_takes_the_step(way, mesh):
    codec = jaxcomp.Policy(jaxcomp.top_k(fraction=0.5), min_size=0, min_ndim=0)
    method = jaxcomp.algorithms.dgd_def(codec, "data", learning_rate=0.1)
    tx = optax.chain(method, optax.adam(1e-3))
    with pytest.raises(ValueError, match=r"must not have an optimizer after .*`learning_rate`"):
        mapped(way, step_of(Mistake({}), tx), tx, mesh)


ROWS = {
    "a loss that is averaged": ["mean of the loss"],
    "gradients that are averaged": ["mean of the gradients"],
    "state of an optimizer": ["momentum before", "adam before"],
    "`optax.MultiSteps`": [
        "apply_if_finite",
        "MultiSteps",
        "conditionally_transform",
        "conditionally_mask",
    ],
}
"""By the beginning of a row of the table in `docs/guarantees.md`, the mistakes that it is about."""

ELSEWHERE = {
    "gradients that JAX has summed": "test_own_gradients.py",
    "the same, then weighted": "test_own_gradients.py",
    "gradients that are summed": "test_own_gradients.py",
    "a collective": "test_uniform.py",
    "gradients at `params`": "test_places.py",
    "gradients of each example": "test_places.py",
    "an optimizer after a method": "test_mistakes.py",
}
"""By the beginning of a row, the file beside this one that has its cases."""

COLUMNS = (("data_parallel", "vma"), ("data_parallel, no vma", "no vma"), ("pmap",))


def test_the_table_of_the_guarantees_is_that_of_the_mistakes():
    page = (ROOT / "docs" / "guarantees.md").read_text().partition("## Mistakes that raise")[2]
    told = {}
    for row in re.findall(r"^\| (.*) \|$", page, flags=re.MULTILINE)[1:]:
        what, *cells = row.split(" | ")
        told[next(begin for begin in [*ROWS, *ELSEWHERE] if what.startswith(begin))] = cells
    assert sorted(name for names in ROWS.values() for name in names) == sorted(MISTAKES)
    assert set(told) == set(ROWS) | set(ELSEWHERE)
    assert all((pathlib.Path(__file__).parent / name).is_file() for name in ELSEWHERE.values())
    for begin, names in ROWS.items():
        for cell, ways in zip(told[begin], COLUMNS, strict=True):
            raises = {MISTAKES[name].errors[way] is not None for name in names for way in ways}
            assert raises == {cell == "raises"}, (begin, cell)


def keyed(params, x, keys):
    del keys
    return jax.lax.pmean(loss(params, x), "data")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("step", "last", "text"),
    [
        (keyed, lambda: jax.random.key(1), r"argument 2 \('keys'\), is a PRNG key.*batch_argnames"),
        (
            keyed,
            lambda: jax.random.split(jax.random.key(1), N),
            r"argument 2 \('keys'\), is a PRNG",
        ),
        (keyed, lambda: jax.random.PRNGKey(1), r"'keys'.*Name the batches among \('params', 'x'"),
    ],
)
def test_the_last_argument_may_not_be_the_batch(step, last, text, check_vma, mesh):
    run = jaxcomp.data_parallel(step, mesh, "data", check_vma=check_vma)
    with pytest.raises(ValueError, match=text):
        run.lower(PARAMS, X, last())


@pytest.mark.parametrize("check_vma", [True, False])
def test_parameters_sharded_over_the_workers(check_vma, mesh):
    lies = NamedSharding(mesh, P("data"))
    params = jax.device_put({"w": jnp.ones((8, 4))}, lies)
    text = r"\['w'\] must not be sharded over 'data'.*'fsdp'.*`param_specs`"
    run = jaxcomp.data_parallel(lambda params, x: (params, x), mesh, "data", check_vma=check_vma)
    with pytest.raises(ValueError, match=r"argument 0 \('params'\)" + text + ".*batch_argnums"):
        run(params, X)
    with pytest.raises(ValueError, match=text):
        jaxcomp.place(params, mesh, "data")
    with pytest.raises(ValueError, match=text):
        jaxcomp.init_state(SGD, params, mesh, "data")
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=lies), params)
    with pytest.raises(ValueError, match=text):
        run.lower(shapes, X)


def test_explicit_parameters_sharded_over_the_workers():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    params = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data")))
    run = jaxcomp.data_parallel(lambda params, x: params, mesh, "data")
    with pytest.raises(ValueError, match=r"argument 0 \('params'\) must not be sharded over"):
        run(params, X)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="must not be sharded over 'data'"):
        jax.jit(run).lower(params, X)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_the_first_results_are_compared_where_types_are_not(kind):
    """A difference in one element of one worker's result is found, by the name of the result."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    kinds = ("bfloat16", "float32", "int8", "uint32", "bool", "complex64", "int4")
    like = {name: jnp.zeros((2, 3), name) for name in kinds}

    def step(params, wrong, x):
        del x
        here = (jax.lax.axis_index("data") == 3) & (jnp.arange(len(kinds)) == wrong)
        found = {
            name: jnp.where(here[at], params[name].at[1, 1].set(jnp.ones((), name)), params[name])
            for at, name in enumerate(kinds)
        }
        return found

    run = jaxcomp.data_parallel(step, mesh, "data", check_vma=False)
    for wrong, name in enumerate(kinds):  # Until a call is right, it counts as the first one.
        with pytest.raises(ValueError, match=rf"result\['{name}'\] differs between the workers"):
            run(like, wrong, X)
    jax.tree.map(np.testing.assert_array_equal, run(like, -1, X), like)
    run(like, 0, X)
