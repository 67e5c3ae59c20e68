"""The equations of programs whose gradients a compressed mean may or must not accept."""

import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.misuse import own_gradients

N = 8
W, X = jnp.ones(3), jnp.ones((4 * N, 3))


def psum(x):
    return jax.lax.psum(x, "data")


def pmean(x):
    return jax.lax.pmean(x, "data")


def own(w, x):
    return jnp.mean((x @ w) ** 2)


def pooled(w, x):
    return pmean(own(w, x))


def total(w, x):
    return jnp.sum((x @ w) ** 2)


def count(x):
    return psum(jnp.sum(x[:, 0] > 0))


def normalized(w, x):
    """Batch norm over all workers."""
    z = x * w
    center = pmean(jnp.mean(z, 0))
    spread = pmean(jnp.mean((z - center) ** 2, 0))
    return jnp.mean(((z - center) / jnp.sqrt(spread + 1e-5)) ** 3)


def normalized_scalars(w, x):
    z = x @ w
    center = pmean(jnp.mean(z))
    return jnp.mean(((z - center) / jnp.sqrt(pmean(jnp.mean((z - center) ** 2)) + 1e-5)) ** 3)


def over_parts(w, x):
    """A loss as a scan over parts of the batch."""
    parts = x.reshape(2, -1, 3)
    return jax.lax.scan(lambda sum, part: (sum + pooled(w, part), None), 0.0, parts)[0]


def grad(f):
    return lambda w, x: jax.grad(f)(w, x)


def with_aux(f):
    return lambda w, x: jax.grad(f, has_aux=True)(w, x)[0]


def accumulated(f):
    def run(w, x):
        def body(sum, part):
            return sum + jax.grad(f)(w, part), None

        return jax.lax.scan(body, jnp.zeros_like(w) + 0 * w, x.reshape(2, -1, 3))[0]

    return run


def while_accumulated(f):
    def run(w, x):
        def body(carry):
            return carry[0] + 1, carry[1] + jax.grad(f)(w, x)

        return jax.lax.while_loop(lambda carry: carry[0] < 2, body, (0, 0 * w))[1]

    return run


POOLED = {
    "plain": grad(pooled),
    "jit": grad(jax.jit(pooled)),
    "jit of grad": lambda w, x: jax.jit(jax.grad(pooled))(w, x),
    "remat": grad(jax.jit(jax.checkpoint(pooled))),
    "value_and_grad": lambda w, x: jax.value_and_grad(pooled)(w, x)[1],
    "vjp": lambda w, x: jax.vjp(lambda w: pooled(w, x), w)[1](jnp.ones(()))[0],
    "aux": with_aux(lambda w, x: (pooled(w, x), x)),
    "each example": grad(lambda w, x: jnp.mean(jax.vmap(lambda r: pmean((r @ w) ** 2))(x))),
    "scaled": grad(lambda w, x: 1024 * pooled(w, x)),
    "one of two terms": grad(lambda w, x: pooled(w, x) + psum(jnp.sum(w * x))),
    "by a factor": grad(lambda w, x: psum(own(w, x)) * (1 / N)),
    "of all examples": grad(lambda w, x: psum(total(w, x)) / psum(x.shape[0])),
    "of all tokens": grad(lambda w, x: psum(total(w, x)) / jnp.maximum(count(x), 1)),
    "in a scan": grad(over_parts),
    "accumulated": accumulated(pooled),
    "accumulated in a loop": while_accumulated(pooled),
    "under a condition": lambda w, x: jax.lax.cond(
        x.sum() > 0, grad(pooled), lambda w, x: w + x[0], w, x
    ),
}

OWN = {
    "plain": grad(own),
    "sum of losses": grad(lambda w, x: psum(own(w, x))),
    "scaled": grad(lambda w, x: 1024.0 * own(w, x)),
    "scaled back": lambda w, x: jax.grad(lambda w: 1024.0 * own(w, x))(w) / 1024.0,
    "parts as many as workers": grad(lambda w, x: own(w, x) / N),
    "a factor made of constants": grad(lambda w, x: own(w, x) * (jnp.float32(1) / N)),
    "weighted": grad(lambda w, x: total(w, x) * N / count(x)),
    "weighted by a factor": grad(lambda w, x: total(w, x) * (N / count(x))),
    "batch norm": grad(normalized),
    "batch norm of scalars": grad(jax.checkpoint(normalized_scalars)),
    "auxiliary loss": grad(lambda w, x: own(w, x) + 0.01 * pmean(jnp.mean(x @ w))),
    "metrics": with_aux(lambda w, x: (own(w, x), pooled(w, x))),
    "metrics in jit": with_aux(jax.jit(lambda w, x: (own(w, x), pooled(w, x)))),
    "gathered": grad(lambda w, x: jnp.mean(jax.lax.all_gather((x @ w) ** 2, "data"))),
    "accumulated": accumulated(own),
    "svrg": lambda w, x: (
        jax.grad(own)(w, x) - jax.grad(own)(0.5 * w, x) + pmean(jax.grad(own)(w, x))
    ),
    "clipped by the norm of all": lambda w, x: (
        jax.grad(own)(w, x) / jnp.maximum(1.0, jnp.sqrt(pmean(jnp.sum(jax.grad(own)(w, x) ** 2))))
    ),
    "each example clipped": lambda w, x: jnp.mean(
        jax.vmap(lambda r: jnp.clip(jax.grad(own)(w, r[None]), -1, 1))(x), 0
    ),
    "contrastive": grad(
        lambda w, x: (
            -jnp.sum(jax.nn.log_softmax((x * w) @ jax.lax.all_gather(x * w, "data", tiled=True).T))
        )
    ),
    "weight of an expert": grad(
        lambda w, x: jnp.sum(
            jax.lax.all_to_all(jnp.tile(x * w, (N, 1)), "data", 0, 0, tiled=True) ** 2
        )
    ),
    "a step of inner descent": lambda w, x: jax.grad(
        lambda w: own(w - 0.1 * pmean(jax.grad(own)(w, x)), x)
    )(w),
    "moved from a mean": lambda w, x: pmean(w) - (w - 0.1 * jax.grad(own)(w, x)),
    "norm of all": lambda w, x: jax.grad(own)(w, x) / jnp.sqrt(psum(jnp.sum(x))),
    "zero": lambda w, x: jnp.zeros_like(w),
}

AVERAGED = {
    "plain": lambda w, x: pmean(jax.grad(own)(w, x)),
    "jit": lambda w, x: jax.jit(lambda w: pmean(jax.grad(own)(w, x)))(w),
    "gathered": lambda w, x: jnp.mean(jax.lax.all_gather(jax.grad(own)(w, x), "data"), 0),
    "scan": lambda w, x: jax.lax.scan(
        lambda sum, part: (sum + pmean(jax.grad(own)(w, part)), None),
        jnp.zeros(3),
        x.reshape(2, -1, 3),
    )[0],
    "of all, and clipped": lambda w, x: jnp.clip(psum(jax.grad(own)(w, x)) / N, -1, 1),
}


MEAN = jaxcomp.compressed_mean(jaxcomp.Dense(), "data")
TRANSFORMS = {
    "accumulate": jaxcomp.accumulate(optax.chain(MEAN, optax.sgd(0.1)), "data", every=2),
    "per_worker": optax.chain(jaxcomp.per_worker(optax.trace(0.5)), MEAN),
    "local_updates": jaxcomp.local_updates(optax.sgd(0.1), None, "data", every=2),
    "gossip": jaxcomp.gossip(optax.sgd(0.1), jaxcomp.qsgd(bits=4), "data"),
}


def begin(w):
    """The zeros with which a typed loop begins."""
    return jax.tree.map(lambda x: jaxcomp.local(jnp.zeros_like(x), "data"), w)


def in_python(one, w, x):
    return 0.5 * (begin(w) + one(w, x) + one(w, 2 * x))


FORMS = {
    "plain": lambda one, w, x: one(w, x),
    "python loop": in_python,
    "fori_loop": lambda one, w, x: jax.lax.fori_loop(
        0, 3, lambda _, total: total + one(w, x) / 3, begin(w)
    ),
    "scan": lambda one, w, x: jax.lax.scan(
        lambda total, part: (total + one(w, part), None), begin(w), x.reshape(2, -1, 3)
    )[0],
    "cond": lambda one, w, x: jax.lax.cond(
        jax.lax.pmin(x.sum(), "data") > 0, lambda: begin(w) + one(w, x), lambda: begin(w)
    ),
    "jit": lambda one, w, x: begin(w) + jax.jit(one)(w, x),
    "cast": lambda one, w, x: one(w, x).astype("bfloat16").astype("float32"),
}

SUMMED = {
    "by jax": lambda w, x: jax.grad(own)(w, x),
    "pmean": lambda w, x: pmean(jax.grad(own)(jaxcomp.local(w, "data"), x)),
    "psum": lambda w, x: psum(jax.grad(own)(jaxcomp.local(w, "data"), x)),
}

MAPPINGS = ("data_parallel", "data_parallel, untyped", "shard_map", "shard_map, untyped", "pmap")


def traced(step, mapping, mesh):
    """Traces `step(w, x)`, which returns a number that is the same on all workers."""
    typed = "untyped" not in mapping
    if mapping == "pmap":
        rows = X.reshape(N, -1, 3)
        return jax.eval_shape(jax.pmap(step, axis_name="data", in_axes=(None, 0)), W, rows)
    if mapping.startswith("data_parallel"):
        return jax.eval_shape(jaxcomp.data_parallel(step, mesh, "data", check_vma=typed), W, X)
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    return jax.eval_shape(jax.shard_map(step, mesh=mesh, check_vma=typed, **specs), W, X)


def checked(grads):
    """Only the check of the gradients."""

    def step(w, x):
        found = own_gradients.check(grads(w, x), "data")
        return pmean(jaxcomp.local(found.sum(), "data"))

    return step


def updated(tx):
    def given(grads):
        def step(w, x):
            updates, _ = tx.update(grads(w, x), tx.init(w), w)
            return pmean(jaxcomp.local(updates.sum(), "data"))

        return step

    return given


def said(step, mapping, mesh):
    """The words of an error or of warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            traced(step, mapping, mesh)
        except ValueError as error:
            return str(error)
    return " ".join(str(each.message) for each in caught)


def check_all(given, forms, mapping, mesh):
    untyped = mapping == "pmap" or "untyped" in mapping
    for form, (how, one) in itertools.product(forms, SUMMED.items()):
        words = said(given(lambda w, x: FORMS[form](one, w, x)), mapping, mesh)  # noqa: B023
        if how == "by jax" and untyped:
            assert "already" not in words, (form, how, words)
        else:
            assert re.search(r"has (averaged|summed)|own gradients.* already", words), (
                form,
                how,
                words,
            )


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_a_gradient_is_not_summed_twice_in_any_form(mapping, mesh):
    """Without types, JAX sums nothing."""
    check_all(checked, FORMS, mapping, mesh)


@pytest.mark.parametrize("mapping", ["data_parallel", "shard_map, untyped", "pmap"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_gradient_is_not_summed_twice_behind_a_transform(name, mapping, mesh):
    check_all(updated(TRANSFORMS[name]), ("plain", "fori_loop"), mapping, mesh)


HIDDEN = {
    "a weight": lambda g, x: g * x.mean(),
    "where": lambda g, x: jnp.where(jnp.isfinite(x.sum()), g, 0.0),
    "a condition": lambda g, x: jax.lax.cond(x.sum() > 0, lambda: g * x[0], lambda: 0 * g * x[0]),
}


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_a_mean_that_other_data_hides_is_warned_about_and_a_sum_refused(mapping, name, mesh):
    def step(reduce):
        own_grad = jax.grad(own)
        return checked(lambda w, x: HIDDEN[name](reduce(own_grad(jaxcomp.local(w, "data"), x)), x))

    with pytest.warns(UserWarning, match="so that nothing is saved"):
        traced(step(pmean), mapping, mesh)
    with pytest.raises(ValueError, match="averaged them"):
        traced(step(psum), mapping, mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced(step(lambda g: g), mapping, mesh)


def test_data_parallel_finds_sums_where_the_update_is_in_an_inner_program(mesh):
    """Gradients that are arguments of an inner program have no history there."""

    def step(w, x, one):
        grads = FORMS["fori_loop"](one, w, x)
        go = jax.lax.pmin(x.sum(), "data") > 0

        def update(grads):
            return MEAN.update(grads, MEAN.init(w), w)[0]

        return jax.lax.cond(go, update, lambda grads: pmean(0 * grads), grads)

    with pytest.raises(ValueError, match="JAX has summed them"):
        traced(lambda w, x: step(w, x, SUMMED["by jax"]), "data_parallel", mesh)
    own_grad = lambda w, x: jax.grad(own)(jaxcomp.local(w, "data"), x)  # noqa: E731
    traced(lambda w, x: step(w, x, own_grad), "data_parallel", mesh)


def trace(grads, mesh, check_vma):
    """Only the check of the gradients, so that nothing is lowered or run."""

    def step(w, x):
        own_gradients.check(grads(jaxcomp.local(w, "data"), x), "data")
        return x

    run = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=check_vma
    )
    jax.eval_shape(run, W, X)


@pytest.mark.parametrize("name", POOLED)
def test_a_loss_that_was_averaged_is_refused_where_jax_divides(name, mesh):
    with pytest.raises(ValueError, match=r"inside the differentiated function.*8 times too small"):
        trace(POOLED[name], mesh, check_vma=True)
    trace(POOLED[name], mesh, check_vma=False)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", OWN)
def test_own_gradients_are_taken(name, check_vma, mesh):
    trace(OWN[name], mesh, check_vma)


@pytest.mark.parametrize("name", AVERAGED)
def test_gradients_that_were_averaged_are_refused(name, mesh):
    with pytest.raises(ValueError, match=r"leave out the jax.lax.pmean"):
        trace(AVERAGED[name], mesh, check_vma=False)


def test_one_gradient_that_is_the_same_on_all_workers_is_no_mistake(mesh):
    """A scale of gathered features, as in contrastive losses."""

    def grads(w, x):
        features = jax.lax.all_gather(x @ w, "data")
        return jax.grad(lambda p: jnp.mean(own(p["w"], x) + p["s"] * features))({"w": w, "s": 1.0})

    trace(grads, mesh, check_vma=False)


def test_one_worker_may_do_as_it_likes():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for check_vma in (True, False):
        trace(POOLED["plain"], mesh, check_vma)
    trace(AVERAGED["plain"], mesh, check_vma=False)


@pytest.mark.filterwarnings("ignore:.*compresses no leaf:UserWarning")
def test_local_steps_that_average_gradients_warn(mesh):
    """Their offsets are the same on all workers then, and messages save nothing."""
    average = optax.stateless(lambda updates, _: jax.tree.map(pmean, updates))
    inner = optax.chain(average, optax.sgd(0.1))
    tx = jaxcomp.local_updates(inner, None, "data", reducer=jaxcomp.qsgd_inf(), every=2)

    def step(params, state, x):
        grads = jax.grad(own)(jaxcomp.view(params, state), x)
        return tx.update(grads, state, params)

    run = jaxcomp.data_parallel(step, mesh, "data")
    with pytest.warns(UserWarning, match="that the program has averaged over the workers"):
        jax.eval_shape(run, W, jaxcomp.init_state(tx, W, mesh, "data"), X)
