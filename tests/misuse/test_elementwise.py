"""Optimizers that each worker may step a part of: every element by one expression."""

import inspect

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

from jaxcomp.misuse import elementwise, expressions

WHOLE = {"kernel": jnp.zeros((2048, 512)), "bias": jnp.zeros(512), "out": jnp.zeros((512, 300))}
PART = [jax.ShapeDtypeStruct((290, 512), jnp.float32)]
DENSE = {0: WHOLE["bias"]}

NEEDS_WHOLE_LEAVES = {
    *("adafactor", "dadapt_adamw", "dog", "dowg", "dpsgd", "fromage", "galore", "lamb", "lars"),
    *("lbfgs", "mechanize", "momo", "momo_adam", "muon", "noisy_sgd", "novograd", "polyak_sgd"),
    *("prodigy", "sm3", "sophia"),
}
NO_OPTIMIZERS = {
    "differentially_private_aggregate",
    "hutchinson_estimator_diag_hessian",
    "normalize",
    "schedule_free_eval_params",
}
SETTINGS = {
    "dadapt_adamw": {"learning_rate": 1.0},
    "dpsgd": {"learning_rate": 0.1, "l2_norm_clip": 1.0, "noise_multiplier": 1.0, "seed": 0},
    "mechanize": {"base_optimizer": optax.adam(1e-3)},
    "noisy_sgd": {"learning_rate": 0.1, "key": 0},
    "optimistic_adam": {"learning_rate": 0.1, "optimism": 1.0},
    "sam": {"optimizer": optax.sgd(0.1), "adv_optimizer": optax.sgd(0.1)},
    "schedule_free": {"base_optimizer": optax.adam(1e-3), "learning_rate": 1e-3},
    "split_real_and_imaginary": {"inner": optax.adam(1e-3)},
}


def optimizers():
    """All optimizers of optax: functions that return a transformation, without their parts."""
    alias = inspect.getmodule(optax.adam)
    found = [getattr(alias, n) for n in vars(alias)]
    found += [getattr(optax.contrib, n) for n in vars(optax.contrib)]
    for one in found:
        name = getattr(one, "__name__", "_")
        home = getattr(one, "__module__", "").startswith(("optax._src.alias", "optax.contrib"))
        if inspect.isfunction(one) and home and not name.startswith(("_", "scale_by_")):
            yield name, one


def refused(optimizer, whole=WHOLE, part=PART, dense=DENSE):
    try:
        elementwise.check(optax.with_extra_args_support(optimizer), whole, part, dense)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore")  # Of optimizers that optax will remove.
def test_all_optimizers_of_optax_are_known():
    made = {}
    for name, make in optimizers():
        if name in NO_OPTIMIZERS:
            continue
        takes_rate = "learning_rate" in inspect.signature(make).parameters
        made[name] = make(**SETTINGS.get(name, {"learning_rate": 1e-3} if takes_rate else {}))
    assert len(made) > 45
    assert {name for name, one in made.items() if refused(one)} == NEEDS_WHOLE_LEAVES


def stateless(function):
    return optax.GradientTransformation(
        lambda params: (), lambda u, s, p=None: (jax.tree.map(function, u), s)
    )


def delayed(steps):
    """Divides by the norm of a former gradient, after as many steps."""

    def init(params):
        return tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(steps))

    def update(updates, state, params=None):
        first, *later = (*state, updates)
        norm = 1e-6 + optax.tree.norm(first)
        return jax.tree.map(lambda x: x / norm, first), tuple(later)

    return optax.GradientTransformation(init, update)


def late(steps):
    """Takes the gradient of some steps ago."""
    return optax.GradientTransformation(
        lambda p: tuple(jax.tree.map(jnp.zeros_like, p) for _ in range(steps)),
        lambda u, s, p=None: (s[0], (*s[1:], u)),
    )


def by(label):
    return lambda params: jax.tree.map(label, params)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (optax.clip_by_global_norm(1e9), "clip_by_global_norm.*reduce_sum"),
        (optax.chain(optax.adam(1.0), optax.centralize()), "centralize.*combines elements"),
        (optax.add_noise(1.0, 0.5, 0), "add_noise.*by their place"),
        (
            optax.masked(optax.scale(2.0), by(lambda x: x.size > 500_000)),
            "masked.*'kernel' otherwise",
        ),
        (optax.masked(optax.scale(2.0), by(lambda x: x.shape[-1] == 512)), "'out' otherwise"),
        (optax.masked(optax.scale(2.0), lambda p: {k: True for k, _ in p.items()}), "no attribute"),
        (optax.scale_by_factored_rms(), "scale_by_factored_rms"),
        (optax.apply_if_finite(optax.adam(1.0), 3), "apply_if_finite"),
        (stateless(lambda x: x[::-1]), "rev"),
        (stateless(lambda x: x * jnp.sum(jnp.ones_like(x))), "otherwise than a worker's part"),
        (stateless(lambda x: x * jnp.linalg.norm(jnp.full_like(x, 0.1))), "otherwise"),
        (
            stateless(
                lambda x: x * jax.lax.reduce(jnp.ones_like(x), 0.0, jax.lax.add, range(x.ndim))
            ),
            "otherwise",
        ),
        (delayed(2), "combines elements"),
        (delayed(7), "combines elements|otherwise"),
        (
            optax.GradientTransformation(
                lambda params: (), lambda u, s, p=None: (jax.tree.map(lambda x: x + s[0], u), s)
            ),
            "IndexError",
        ),
    ],
)
def test_the_member_and_the_reason_are_named(optimizer, says):
    with pytest.raises(ValueError, match=says):
        elementwise.check(optax.with_extra_args_support(optimizer), WHOLE, PART, DENSE)


def test_leaves_of_one_shape_may_not_be_mixed():
    swap = optax.GradientTransformation(lambda p: (), lambda u, s, p=None: (u[::-1], s))
    pair = optax.chain(optax.adam(1.0), swap)
    elementwise.check(optax.adam(1.0), (WHOLE["out"],) * 2, PART, {})
    with pytest.raises(ValueError, match="from another leaf"):
        elementwise.check(optax.with_extra_args_support(pair), (WHOLE["out"],) * 2, PART, {})


def test_masks_by_dtype_are_found():
    """All leaves are stepped in float32, so the optimizer would take them for one dtype."""
    given = WHOLE | {"out": WHOLE["out"].astype(jnp.bfloat16)}
    decayed = optax.adamw(1e-3, mask=by(lambda x: x.dtype == jnp.float32))
    elementwise.check(decayed, WHOLE, PART, DENSE)
    elementwise.check(optax.adamw(1e-3), WHOLE, PART, DENSE, given)
    with pytest.raises(ValueError, match=r"'out' otherwise.*another dtype"):
        elementwise.check(decayed, WHOLE, PART, DENSE, given)


def test_by_rank_and_by_number_works():
    adam = optax.adam(optax.warmup_cosine_decay_schedule(0, 1e-3, 10, 100))
    for optimizer in (
        optax.adamw(1e-3, mask=by(lambda x: x.ndim == 2)),
        optax.multi_transform({"a": adam, "b": optax.sgd(0.1)}, by(lambda x: "ab"[x.ndim == 1])),
        optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(1, 0, 10)),
        optax.MultiSteps(adam, 3).gradient_transformation(),
        optax.chain(adam, optax.contrib.reduce_on_plateau()),
        # The state of matrices depends on them some steps later than that of other leaves.
        optax.multi_transform({"a": late(6), "b": adam}, by(lambda x: "ab"[x.ndim == 1])),
    ):
        assert refused(optimizer) is None
    # Whole leaves and parts are both too small to be factored.
    small = {"kernel": jnp.zeros((64, 512)), "bias": jnp.zeros(512)}
    part = [jax.ShapeDtypeStruct((16, 512), jnp.float32)]
    assert refused(optax.scale_by_factored_rms(), small, part) is None


def test_expressions_are_of_elements():
    """The same function of other shapes is the same expression, and another function is not."""

    def run(function, shape):
        like = jax.ShapeDtypeStruct(shape, jnp.float32)
        return table.run(jax.make_jaxpr(function)(like), [table.leaf("x", like, 0)])

    table = expressions.Expressions()
    scaled = run(lambda x: jnp.where(x > 0, 2 * x, jnp.zeros_like(x)) + 1, (3, 4))
    again = run(lambda x: jnp.where(x > 0, 2 * x, jnp.zeros_like(x)) + 1, (7,))
    other = run(lambda x: jnp.where(x > 0, 3 * x, jnp.zeros_like(x)) + 1, (7,))
    assert scaled[0].expression == again[0].expression != other[0].expression
    reshaped = run(lambda x: x.reshape(12)[None] * 2, (3, 4))
    assert reshaped[0].shape == (1, 12)
    assert reshaped[0].leaf == 0
    branches = run(lambda x: jax.lax.cond(True, lambda: x * 2, lambda: x * 3), (3,))
    assert branches[0].leaf == 0
    for function in (jnp.sum, jnp.sort, jnp.cumsum, jnp.transpose, lambda x: x + jnp.arange(4.0)):
        with pytest.raises(expressions.NotElementwiseError):
            run(lambda x, f=function: x + f(x).sum(), (4, 4))
