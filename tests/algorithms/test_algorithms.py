"""Every method: its uncompressed form, many workers, and the codecs that it accepts."""

import functools
import importlib
import inspect
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.methods import (
    ALONE,
    AXIS,
    IDENTITY,
    METHODS,
    PARENTS,
    QSGD,
    RATE,
    ROUNDS,
    SIZE,
    TOP,
    alone,
    build,
    everywhere,
)
from helpers.paths import ROOT
from helpers.suite import few_or_all

import jaxcomp
from jaxcomp.backend import axes
from jaxcomp.testing import problems


@pytest.mark.core("diana", "artemis", "ef21", "dore", "censored_heavy_ball", "qcmd_adagrad")
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ALONE])
def test_the_identity_gives_the_parent(name, x64):
    problem, steps = problems.quadratics(), 24
    run = problems.descend(build(name, IDENTITY), problem, steps, AXIS)
    parent = alone(PARENTS.get(name, optax.sgd)(RATE), problem, steps // ROUNDS.get(name, 1))
    assert run.alike
    np.testing.assert_allclose(run.params, parent[-1], rtol=0, atol=1e-10)


def test_every_method_is_tried():
    """Methods that equal another method at one setting: no momentum, signs."""
    recipes = set()
    for part in (
        "residuals",
        "shifts",
        "unbiased",
        "composite",
        "adaptive",
        "local_methods",
        "outer_steps",
    ):
        module = importlib.import_module(f"jaxcomp.algorithms.{part}")
        made = inspect.getmembers(module, inspect.isfunction)
        recipes |= {name for name, f in made if f.__module__ == module.__name__ and name[0] != "_"}
    assert recipes - set(METHODS) == {"lag", "ef_signsgd", "cpsgd", "genqsgd"}


def test_a_mean_without_a_rate_has_no_step():
    """Only methods whose formula needs the rate take it."""
    taking = set()
    for part in ("residuals", "shifts", "unbiased", "adaptive", "finite_sums"):
        module = importlib.import_module(f"jaxcomp.algorithms.{part}")
        for name, made in inspect.getmembers(module, inspect.isfunction):
            public = made.__module__ == module.__name__ and name[0] != "_"
            if public and "learning_rate" in inspect.signature(made).parameters:
                taking.add(name)
    assert taking == {
        *("censored_heavy_ball", "lag", "mcm", "rand_mcm", "zero_one_adam", "dspg", "dpsvrg")
    }


def diagonal(workers):
    """Losses `½ Σ aᵢ(x − bᵢ)²`, whose gradients are the same bits however workers are mapped."""
    rng = np.random.default_rng(7)
    slopes = rng.uniform(0.5, 1.5, (workers, SIZE)).astype(np.float32)
    optima = rng.standard_normal((workers, SIZE)).astype(np.float32)
    return slopes, optima


def stepper(tx):
    def step(params, state, batch):
        slope, optimum = (rows.reshape(1, SIZE) for rows in batch)

        def grad_fn(at):
            return {"x": slope * (at["x"] - optimum)}

        at = jaxcomp.local(jaxcomp.view(params, state), AXIS)
        updates, state = tx.update(grad_fn(at), state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), state

    return step


START = {"x": jnp.zeros((1, SIZE))}


def by_vmap(tx, workers, steps, moment=None):
    """Parameters after each step; at one step, the state is saved and restored."""
    batch = diagonal(workers)
    everyone = jax.jit(jax.vmap(stepper(tx), (0, 0, 0), axis_name=AXIS))
    state = jax.jit(jax.vmap(lambda _: tx.init(START), axis_name=AXIS))(jnp.arange(workers))
    params = jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *x.shape)), START)
    found = []
    for number in range(steps):
        if number == moment:
            params, state = jax.tree.map(lambda x: jnp.asarray(np.array(x)), (params, state))
        params, state = everyone(params, state, batch)
        found.append(np.asarray(params["x"]))
    return found


MANY = few_or_all(
    [(name, 20 if number % 2 else 100) for number, name in enumerate(METHODS) if number % 3 == 1],
    [(name, workers) for name in METHODS for workers in (20, 100)],
)


@pytest.mark.core("diana-100")
@pytest.mark.parametrize(("name", "workers"), MANY)
def test_many_workers_stay_alike_and_go_on_from_a_checkpoint(name, workers):
    tx = build(name)
    straight = by_vmap(tx, workers, 4)
    for rows in straight:
        assert np.isfinite(rows).all()
        assert (rows == rows[:1]).all()  # The centre, bit for bit.
    resumed = by_vmap(tx, workers, 4, moment=2)
    np.testing.assert_array_equal(straight[-1], resumed[-1])
    assert (straight[-1] != 0).any()


CLASSES = {
    "unbiased, ω < 1 (`qsgd(bits=6)`)": jaxcomp.qsgd(bits=6, bucket_size=SIZE),
    "unbiased (`qsgd(bits=2)`)": jaxcomp.qsgd(bits=2, bucket_size=SIZE),
    "contractive (`sign`, `top_k`)": jaxcomp.sign(bucket_size=SIZE),
    "neither (`ndsc(dithered=False)`)": jaxcomp.ndsc(bits=2, dithered=False),
}
DOCS = ROOT / "docs" / "algorithms.md"


def verdict(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with axes.assume_workers(4):
                make().init(START)
        except ValueError:
            return "no"
    return "warns" if caught else "yes"


FAMILIES = {
    "Error feedback and signs": "ef_sgd; double_squeeze; neolithic; one_bit_adam; zero_one_adam",
    "Shifts": "ef21; ef21_sgdm; ef21_bc; cd_adam; clag; diana; marina; artemis; dore; dore, down; "
    "mcm; mcm, down; rand_mcm; censored_heavy_ball",
    "Composite and constrained problems": "qcmd_adagrad; qrda_adagrad; dgd_def; dq_psgd",
    "Local steps": "local_sgd; post_local_sgd; adpsgd; fedpaq; diloco; streaming_diloco; muloco; "
    "sparseloco",
}
"""The methods of each table."""


def accepted():
    """The classes of codecs that each method accepts, as a table for each family."""
    ways = {
        **{name: functools.partial(build, name) for name, (_, own) in METHODS.items() if own},
        "dore, down": lambda codec: jaxcomp.algorithms.dore(QSGD, AXIS, down=codec),
        "mcm, down": lambda codec: jaxcomp.algorithms.mcm(
            QSGD, AXIS, learning_rate=RATE, down=codec
        ),
    }
    families = {family: names.split("; ") for family, names in FAMILIES.items()}
    assert sorted(ways) == sorted(name for names in families.values() for name in names)
    head = ["| method | " + " | ".join(CLASSES) + " |", "|---|" + "---|" * len(CLASSES)]
    parts = []
    for family, names in families.items():
        lines = []
        for name in names:
            makes = (functools.partial(ways[name], everywhere(codec)) for codec in CLASSES.values())
            lines.append(f"| `{name}` | " + " | ".join(verdict(make) for make in makes) + " |")
        parts.append(f"**{family}**\n\n" + "\n".join([*head, *lines]))
    return "\n\n".join(parts)


def test_the_tables_of_what_goes_together():
    tables = accepted()
    if os.environ.get("JAXCOMP_WRITE_DOCS"):
        before, rest = DOCS.read_text().split("a codec of each class.\n\n")
        after = rest[rest.index('"Warns"') :]
        DOCS.write_text(f"{before}a codec of each class.\n\n{tables}\n\n{after}")
    assert tables in DOCS.read_text(), tables
    assert "| `diana` | yes | yes | no | no |" in tables
    assert "| `ef21` | yes | no | yes | no |" in tables


def test_wrong_use_of_methods_says_what_would_do():
    """A message names the argument, the allowed values and the given value."""
    forgetful = jaxcomp.Link(QSGD, jaxcomp.Shift(0.05, absent="left out"))
    with pytest.raises(ValueError, match=r"`absent` must be one of"):
        jaxcomp.Shift(absent="gone")
    with pytest.raises(ValueError, match=r"requires jaxcomp.Gather"):
        jaxcomp.compressed_mean(
            jaxcomp.TwoShot(forgetful, QSGD.codec), AXIS, gate=jaxcomp.gates.Bernoulli(0.5)
        )
    with pytest.raises(ValueError, match=r"`restart` must be a gate that opens for all"):
        jaxcomp.algorithms.compressed_differences(QSGD, AXIS, restart=jaxcomp.gates.Bernoulli(0.5))
    with pytest.raises(ValueError, match=r"`codec` must be unbiased"):
        jaxcomp.algorithms.marina(jaxcomp.sign(), AXIS, p=0.1)
    with pytest.raises(ValueError, match=r"`step` must be a number of at most"):
        jaxcomp.algorithms.diana(jaxcomp.qsgd(bits=2, bucket_size=None), AXIS)
    for make in (jaxcomp.algorithms.diana, jaxcomp.algorithms.artemis):
        with pytest.raises(ValueError, match=r"`codec` must be unbiased"):
            make(jaxcomp.sign(), AXIS)
    with pytest.raises(ValueError, match=r"`codec` must be unbiased"):
        jaxcomp.algorithms.mcm(jaxcomp.sign(), AXIS, learning_rate=0.1)
    with pytest.raises(ValueError, match=r"`down` must be None where the absent are 'left out'"):
        jaxcomp.algorithms.artemis(QSGD, AXIS, p=0.5, absent="left out", down=QSGD)
    with pytest.raises(ValueError, match=r"`every` must be"):
        jaxcomp.accumulate(optax.sgd(0.1), AXIS, every=0)
    with pytest.raises(ValueError, match=r"`codec` must be a codec"):
        jaxcomp.algorithms.preserved_center(jaxcomp.Dense(), AXIS, step=0.1)
    with pytest.raises(ValueError, match=r"`codec` must have links with a residual"):
        jaxcomp.algorithms.displaced_mean(jaxcomp.Link(QSGD), AXIS, learning_rate=0.1)
    with pytest.raises(ValueError, match=r"`projection` must be a function"):
        jaxcomp.algorithms.dq_psgd(jaxcomp.ndsc(2), AXIS, learning_rate=0.1, projection=1.0)
    with pytest.raises(
        ValueError, match=r"`state` must be that of a chain with jaxcomp.optimizers.averaged"
    ):
        jaxcomp.optimizers.average(optax.sgd(0.1).init(START))
    with pytest.raises(ValueError, match=r"`learning_rate` must be"):
        jaxcomp.algorithms.censored_heavy_ball(None, AXIS, learning_rate=0.0)
    with pytest.raises(ValueError, match=r"`momentum` must be below 1"):
        jaxcomp.algorithms.censored_heavy_ball(None, AXIS, learning_rate=0.1, momentum=1.0)
    with pytest.raises(ValueError, match=r"`momentum` must be"):
        jaxcomp.algorithms.signsgd(AXIS, momentum=1.5)
    with pytest.raises(ValueError, match=r"`threshold` must be"):
        jaxcomp.algorithms.clag(TOP, AXIS, threshold=-1.0)
    with pytest.raises(ValueError, match=r"`eta` must be"):
        jaxcomp.algorithms.ef21_sgdm(jaxcomp.sign(), AXIS, eta=2.0)
    for chance in (0, 1.5):
        with pytest.raises(ValueError, match=r"`p` must be"):
            jaxcomp.algorithms.artemis(QSGD, AXIS, p=chance)

    def without(tx):
        return jax.vmap(lambda x: tx.update(x, tx.init(START))[0], axis_name=AXIS)(
            {"x": jnp.zeros((2, 1, SIZE))}
        )

    with pytest.raises(ValueError, match=r"`params` and `grad_fn` must be given"):
        without(build("marina"))
    with pytest.raises(ValueError, match=r"`params` must be given"):
        without(jaxcomp.algorithms.preserved_center(QSGD, AXIS, step=0.1))
    with pytest.raises(ValueError, match=r"`params` must be given"):
        without(jaxcomp.optimizers.projected(lambda x: x))


@pytest.mark.full
def test_a_state_made_outside_fits_the_workers(mesh):
    """The shapes of a step between rounds are those of eight workers."""
    mesh = jax.sharding.Mesh(mesh.devices, (AXIS,))
    tx, params = build("neolithic"), START
    state = jaxcomp.init_state(tx, START, mesh, AXIS)
    run = jaxcomp.data_parallel(stepper(tx), mesh, AXIS)
    batch = tuple(jnp.asarray(rows) for rows in diagonal(8))
    for _ in range(2):
        params, state = run(params, state, batch)
    np.testing.assert_allclose(params["x"], by_vmap(tx, 8, 2)[-1][0], rtol=1e-6, atol=1e-7)


QUARTER = everywhere(jaxcomp.random_k(fraction=0.25, bucket_size=SIZE))
"""Of variance `ω = 3`."""


@pytest.mark.parametrize(("name", "step"), [("diana", 0.25), ("artemis", 0.125), ("dore", 0.125)])
def test_the_default_step_of_the_memory_is_that_of_the_paper(name, step):
    make = getattr(jaxcomp.algorithms, name)
    settings = {"down": IDENTITY} if name == "dore" else {}
    given = jnp.asarray(np.random.default_rng(0).standard_normal((2, 1, SIZE)), jnp.float32)

    def state(tx):
        def own(x):
            return tx.update({"x": x}, tx.init({"x": x}), {"x": x})[1]

        return jax.vmap(own, axis_name=AXIS)(given)

    published, default = make(QUARTER, AXIS, step=step, **settings), make(QUARTER, AXIS, **settings)
    want, got = jax.jit(lambda: (state(published), state(default)))()
    jax.tree.map(np.testing.assert_array_equal, got, want)
