"""Collectives under conditions: `data_parallel` refuses those that some workers would not reach."""

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp

W, X = jnp.ones(3), jnp.ones((16, 3))
CODEC = jaxcomp.Policy(jaxcomp.qsgd(bits=4), min_size=0, min_ndim=0)
TX = optax.chain(jaxcomp.compressed_mean(CODEC, "data"), optax.sgd(0.1))


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def agree(ok):
    return jax.lax.pmin(ok.astype(jnp.int32), "data") > 0


def pmean(x):
    return jax.lax.pmean(jaxcomp.local(x, "data"), "data")


def grad(w, x):
    return jax.grad(loss)(jaxcomp.local(w, "data"), x)


def moved(w, g):
    return optax.apply_updates(w, TX.update(g, TX.init(w), w)[0])


def cond(ok, w, x):
    return jax.lax.cond(ok, lambda: pmean(w + x[0]), lambda: w)


def switch(ok, w, x):
    return jax.lax.switch(ok.astype(int), [lambda: w, lambda: w, lambda: pmean(w + x[0])])


def update(ok, w, x):
    # A new function each time, since JAX does not trace a branch again that it knows.
    return jax.lax.cond(ok, lambda w, g: moved(w, g), lambda w, g: w, w, grad(w, x))


def as_long_as(ok, w, x):
    first = (jaxcomp.local(ok, "data"), w)
    return jax.lax.while_loop(
        lambda carry: carry[0], lambda carry: (carry[0] & False, pmean(carry[1] + x[0])), first
    )[1]


def in_a_scan(ok, w, x):
    return jax.lax.scan(lambda w, row: (cond(ok, w, row[None]), None), w, x)[0]


def in_jit(ok, w, x):
    return jax.jit(lambda ok: cond(ok, w, x))(ok)


FORMS = (cond, switch, update, as_long_as, in_a_scan, in_jit)

HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
DIFFERS = {
    "loss": lambda w, x: jnp.isfinite(loss(w, x)),
    "index": lambda w, x: jax.lax.axis_index("data") > 2,
    "permuted": lambda w, x: jax.lax.ppermute(x, "data", [(i, 7 - i) for i in range(8)]).sum() > 0,
    "carried": lambda w, x: jax.lax.fori_loop(0, 3, lambda i, s: s + x.sum() * i, x.sum()) > 1,
    "after a loop": lambda w, x: (
        jax.lax.while_loop(
            lambda c: c[0] < x.sum(), lambda c: (c[0] + 1, c[1] + 1), (0.0 * x.sum(), 0)
        )[1]
        > 3
    ),
}

ALIKE = {
    "pmin": lambda w, x: agree(jnp.isfinite(loss(w, x))),
    "parameters": lambda w, x: w.sum() > 3,
    "pmean": lambda w, x: pmean(loss(w, x)) < 3,
    "gathered": lambda w, x: pmean(jax.lax.all_gather(loss(w, x), "data").max()) < 3,
}


def traced(condition, form, mesh, check_vma):
    step = jaxcomp.data_parallel(
        lambda w, x: form(condition(w, x), w, x), mesh, "data", check_vma=check_vma
    )
    return jax.eval_shape(step, W, X)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_collective_under_a_condition_that_differs_is_refused(form, check_vma, mesh):
    with pytest.raises(ValueError, match=r"wait for the others for ever.*pmin") as caught:
        traced(DIFFERS["loss"], form, mesh, check_vma)
    lines, first = inspect.getsourcelines(in_a_scan if form is in_a_scan else form)
    places = [f"test_uniform.py:{first + number} " for number in range(len(lines))]
    if form not in (in_a_scan, in_jit):  # Their conditional is a line of `cond`.
        assert any(place in str(caught.value) for place in places)
    traced(ALIKE["pmin"], form, mesh, check_vma)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", DIFFERS)
def test_conditions_that_differ_are_recognised(name, check_vma, mesh):
    with pytest.raises(ValueError, match=r"differs between the workers of 'data'"):
        traced(DIFFERS[name], cond, mesh, check_vma)


def test_a_sum_over_groups_of_workers_differs_between_the_groups(mesh):
    def condition(w, x):
        return jax.lax.psum(x.sum(), "data", axis_index_groups=HALVES) > 0

    with pytest.raises(ValueError, match=r"differs between the workers of 'data'"):
        traced(condition, cond, mesh, check_vma=False)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ALIKE)
def test_conditions_that_are_the_same_everywhere_are_taken(name, check_vma, mesh):
    assert traced(ALIKE[name], cond, mesh, check_vma).shape == W.shape


def test_a_condition_may_differ_where_nothing_is_sent(mesh):
    def local_only(ok, w, x):
        return pmean(jax.lax.cond(ok, lambda: x[0], lambda: 0 * x[0]))

    traced(DIFFERS["loss"], local_only, mesh, check_vma=True)


def test_workers_of_another_axis_may_decide_otherwise():
    """Each row of workers communicates on its own, so that only its members must agree."""
    mesh = jax.make_mesh((2, 4), ("pod", "data"))

    def step(over):
        def run(w, x):
            ok = jax.lax.pmax(x.sum(), over) > 0
            return jax.lax.pmax(cond(ok, w, x), ("pod", "data"))

        return jaxcomp.data_parallel(run, mesh, ("pod", "data"), check_vma=False)

    jax.eval_shape(step("data"), W, X)
    with pytest.raises(ValueError, match=r"differs between the workers of \('pod', 'data'\)"):
        jax.eval_shape(step("pod"), W, X)


def test_a_shard_map_of_ones_own_knows_conditions_that_types_say_differ(mesh):
    """Without types, an argument of the mapped function may be the same on all workers."""

    def traced(condition, check_vma):
        step = jax.shard_map(
            lambda w, x: update(condition(w, x), w, x),
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=check_vma,
        )
        jax.eval_shape(step, W, X)

    for name, check_vma in (("loss", True), ("index", True), ("index", False)):
        with pytest.raises(ValueError, match=r"around it, at .*test_uniform.py.*pmin"):
            traced(DIFFERS[name], check_vma)
    for name in ALIKE:
        traced(ALIKE[name], check_vma=True)


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_library_decides_by_means_and_counts_of_steps(check_vma, mesh):
    """A guarded count of steps depends on a dense mean, and a schedule of phases on the count."""
    coarse, fine = (jaxcomp.Gather(jaxcomp.qsgd_inf(bits=bits)) for bits in (2, 4))
    reducer = jaxcomp.ReducerSchedule(((0, fine), (2, coarse)))
    tx = jaxcomp.compressed_mean(reducer, "data")
    params = {"w": jnp.ones((16, 64)), "b": jnp.zeros(4)}
    state = jaxcomp.init_state(tx, params, mesh, "data")

    def run(state, x):
        def step(state, t):
            grads = jax.tree.map(lambda p: p * x[0] * t, params)
            return tx.update(jaxcomp.local(grads, "data"), state)[::-1]

        return jax.lax.scan(step, state, jaxcomp.local(jnp.arange(3.0), "data"))[0]

    jaxcomp.data_parallel(run, mesh, "data", check_vma=check_vma).trace(state, jnp.ones(8))
