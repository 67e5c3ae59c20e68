"""The equations of programs whose gradients a compressed mean may or must not accept."""

import jax
import jax.numpy as jnp
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
