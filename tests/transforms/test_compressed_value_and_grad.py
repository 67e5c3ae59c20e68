"""`compressed_value_and_grad` in programs with automatic sharding, beside `jax.value_and_grad`."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxcomp
from jaxcomp.backend import adapting

IDENTITY = jaxcomp.codecs.Identity()
KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "a": jax.random.normal(KEYS[0], (96, 256)) / 8,
    "b": jax.random.normal(KEYS[1], (256, 33)) / 8,
}
SPECS = {"a": P("tensor"), "b": P("fsdp")}
BATCH = {
    "x": jax.random.normal(KEYS[2], (24, 96)),
    "y": jax.random.normal(KEYS[3], (24, 33)),
    "kept": (jnp.arange(24) % 7 < jnp.arange(24) // 6 + 1).astype(jnp.float32),
    "scale": jnp.float32(2),
}


@pytest.fixture(scope="module")
def cube():
    """The mesh of a program: hosts, and on each shards of two kinds."""
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def errors(mesh, params, batch):
    """One error for each example, by a program for the whole mesh."""

    def product(x, w):
        return jax.lax.psum(x @ w, "tensor")

    rows = ("data", "fsdp")
    x = jax.lax.with_sharding_constraint(batch["x"], NamedSharding(mesh, P(rows, "tensor")))
    specs = {"in_specs": (P(rows, "tensor"), P("tensor", None)), "out_specs": P(rows, None)}
    y = jax.shard_map(product, mesh=mesh, check_vma=False, **specs)(x, params["a"])

    @jax.checkpoint
    def layer(c, _):
        return jnp.tanh(c), c.mean()

    y = jax.lax.scan(layer, y, None, length=2)[0] @ params["b"] * batch["scale"]
    y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("data", None)))
    return ((y - batch["y"]) ** 2).mean(-1)


def loss_of(mesh):
    def loss_fn(params, batch, rng):
        each, kept = errors(mesh, params, batch), batch["kept"]
        total, count = (each * kept).sum(), kept.sum()
        return total / (count + 1e-8), {
            "total": total,
            "count": count,
            "right": (each > 6.9).sum(),
            "accuracy": (each > 6.9).mean(),
            "masked accuracy": ((each > 6.9) * kept).sum() / count,
            "rows": each,
            "columns": jnp.stack([each, each]),
            "layers": jnp.stack([each.mean(), (each**2).mean()]),
            "rng": rng,
            "step": jnp.int32(3),
            "name": None,
        }

    return loss_fn


SUMS = {"sums": ("total", "right"), "weight": "count"}


def close(got, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), got, want)


def test_without_rounding_it_is_the_whole_program(cube):
    """Weights, sums, rows, keys, scanned layers, constraints and a nested `shard_map`."""
    homes = {name: NamedSharding(cube, spec) for name, spec in SPECS.items()}
    params, loss_fn = jax.device_put(PARAMS, homes), loss_of(cube)
    args = (params, BATCH, jax.random.key(5))
    (loss, aux), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(*args)
    grad_fn = jaxcomp.compressed_value_and_grad(
        loss_fn, cube, "data", IDENTITY, has_aux=True, batch_argnums=1, param_specs=SPECS, **SUMS
    )
    (own, beside), found = jax.jit(grad_fn)(*args, key=0)
    close((own, found), (loss, grads))
    assert beside.pop("rng") == aux.pop("rng")
    close(beside, aux)
    assert {name: x.sharding.spec for name, x in found.items()} == SPECS
    assert beside["rows"].sharding.spec == P("data")


def test_each_device_sends_its_shard(cube):
    """With specs no leaf is gathered over the fast axes before it crosses the slow one."""
    loss_fn = loss_of(cube)
    homes = {name: NamedSharding(cube, spec) for name, spec in SPECS.items()}
    params = jax.device_put(PARAMS, homes)

    def gathered(specs):
        grad_fn = jaxcomp.compressed_value_and_grad(
            loss_fn, cube, "data", jaxcomp.qsgd_inf(bits=4), has_aux=True, batch_argnums=1,
            param_specs=specs, **SUMS,
        )  # fmt: skip
        step = jax.jit(lambda *args: grad_fn(*args, key=0)[1], out_shardings=homes)
        program = step.lower(params, BATCH, jax.random.key(0)).compile()
        return jaxcomp.collective_bytes(program).get("all-gather", 0)

    with pytest.warns(UserWarning, match="param_specs"):
        whole = gathered(None)
    assert gathered(SPECS) < whole / 2


def test_memory_is_an_argument_and_a_result(cube):
    """With feedback, behind a gate; the mean of steps comes near the gradient."""
    loss_fn, homes = loss_of(cube), {n: NamedSharding(cube, s) for n, s in SPECS.items()}
    args = (jax.device_put(PARAMS, homes), BATCH, jax.random.key(5))
    grads = jax.jit(jax.grad(loss_fn, has_aux=True))(*args)[0]
    grad_fn = jaxcomp.compressed_value_and_grad(
        loss_fn, cube, "data", jaxcomp.sign(), has_aux=True, batch_argnums=1, param_specs=SPECS,
        gate=jaxcomp.gates.Every(2), **SUMS,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"grad_fn\.init\(params\)"):
        grad_fn(*args, key=0)
    memory, step, total = grad_fn.init(args[0]), jax.jit(grad_fn), 0

    def lie(tree):
        kinds = [(x.dtype, x.sharding.devices_indices_map(x.shape)) for x in jax.tree.leaves(tree)]
        return jax.tree.structure(tree), kinds

    before = lie(memory)
    for number in range(8):
        _, found, memory = step(*args, key=number, memory=memory)
        total = jax.tree.map(jnp.add, total, found) if number else found
    assert lie(memory) == before
    assert int(memory.gate.rounds) == 4
    for name, grad in grads.items():
        assert jnp.linalg.norm(total[name] / 8 - grad) < 0.5 * jnp.linalg.norm(grad)
    resized = jaxcomp.resize_workers(grad_fn.tx, memory, args[0], 4)
    assert {x.shape[0] for x in jax.tree.leaves(resized.memory)} == {4}


def test_explicit_axes_tell_how_parameters_are_sharded():
    """As in JAX's own programs under `jax.set_mesh`, with `reshard` and `out_sharding=`."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
    rows = P(("data", "fsdp"))

    def loss_fn(params, x):
        a = jax.sharding.reshard(params["a"], P(None, "tensor"))
        b = jax.sharding.reshard(params["b"], P("tensor", None))
        y = jnp.tanh(jnp.einsum("bi,ij->bj", x, a, out_sharding=P(rows[0], "tensor")))
        return (jnp.einsum("bi,ij->bj", y, b, out_sharding=P(rows[0], None)) ** 2).mean()

    with jax.set_mesh(mesh):
        homes = {"a": P("fsdp", "tensor"), "b": P("tensor")}
        params = {name: jax.device_put(PARAMS[name], spec) for name, spec in homes.items()}
        x = jax.device_put(BATCH["x"], rows)
        want = jax.jit(jax.value_and_grad(loss_fn))(params, x)
        grad_fn = jaxcomp.compressed_value_and_grad(loss_fn, mesh, "data", jaxcomp.sign())
        memory = grad_fn.init(params)
        _, grads, memory = jax.jit(grad_fn)(params, x, key=1, memory=memory)
        assert memory.memory.axes == ("fsdp", "tensor")
        assert jax.tree.map(jax.typeof, grads) == jax.tree.map(jax.typeof, want[1])
        exact = jaxcomp.compressed_value_and_grad(loss_fn, mesh, "data", IDENTITY)
        close(jax.jit(exact)(params, x, key=1), want)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(96, 256, rngs=rngs), nnx.BatchNorm(256, rngs=rngs)
        self.drop, self.last = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(256, 33, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(self.norm(jnp.tanh(self.first(x)))))


def test_nnx_objects_and_pure_states(mesh):
    """Objects change in place; the random state that a loss returns is one for all workers."""

    def loss_fn(model, batch):
        return optax.l2_loss(model(batch["x"]), batch["y"]).mean()

    model, batch = Model(nnx.Rngs(0)), {"x": BATCH["x"], "y": BATCH["y"]}
    graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

    def pure_loss(params, rest, config, batch):
        assert config is batch_config
        own = nnx.merge(graph, params, rest, copy=True)
        return loss_fn(own, batch), nnx.state(own, nnx.Not(nnx.Param))

    batch_config = object()
    of_objects = jaxcomp.compressed_value_and_grad(loss_fn, mesh, "data", IDENTITY)
    of_states = jaxcomp.compressed_value_and_grad(pure_loss, mesh, "data", IDENTITY, has_aux=True)
    loss, grads = nnx.jit(lambda model, batch: of_objects(model, batch, key=0))(model, batch)
    step = jax.jit(lambda *args: of_states(*args[:2], batch_config, args[2], key=0))
    (own, after), found = step(params, rest, batch)
    close((own, nnx.to_pure_dict(found)), (loss, nnx.to_pure_dict(grads)))
    assert after["drop"]["rngs"]["count"] == model.drop.rngs.count == 1
    assert after["drop"]["rngs"]["key"].get_value() == rest["drop"]["rngs"]["key"].get_value()
    np.testing.assert_allclose(after["norm"]["mean"][...], model.norm.mean[...], rtol=1e-6)


def test_keys_are_folded_by_worker(mesh):
    """Typed ones by themselves, raw ones by `key_argnums`; a new key is one for all workers."""

    def loss_fn(w, key, raw, *, x):
        own, after = jax.random.split(key)
        noise = [jax.random.uniform(k, (len(x), 256)) for k in (own, raw)]
        return (x @ w * noise[0]).mean(), (noise[0], noise[1], after)

    grad_fn = jaxcomp.compressed_value_and_grad(
        loss_fn, mesh, "data", IDENTITY, has_aux=True, batch_argnames="x", key_argnums=2
    )
    x, keys = BATCH["x"], (jax.random.key(1), jax.random.PRNGKey(2))
    (_, (one, two, after)), _ = jax.jit(lambda w: grad_fn(w, *keys, x=x, key=0))(PARAMS["a"])
    assert min(len(np.unique(noise)) for noise in (one, two)) > 0.99 * one.size
    assert after.shape == ()
    assert jax.random.key_data(after).sharding.is_fully_replicated


def accumulate(loss_fn, argnums, has_aux):
    """Gradients of two micro-batches, of unequal numbers of examples that count."""
    assert (argnums, has_aux) == (0, True)

    def run(params, x, kept):
        def one(total, micro):
            def summed(params):
                loss, count = loss_fn(params, *micro)
                return loss * count, count

            value, grads = jax.value_and_grad(summed, has_aux=True)(params)
            return jax.tree.map(jnp.add, total, (value, grads)), None

        micro = [a.reshape(2, -1, *a.shape[1:]) for a in (x, kept)]
        zeros = jax.tree.map(jnp.zeros_like, params)
        ((total, count), grads), _ = jax.lax.scan(one, ((0.0, 0.0), zeros), micro)
        return (total / count, count), jax.tree.map(lambda g: g / count, grads)

    return run


def test_accumulated_gradients_are_exchanged_once(mesh):
    def loss_fn(w, x, kept):
        return ((x @ w) ** 2 * kept[:, None]).sum() / kept.sum(), kept.sum()

    x, kept = jnp.tile(BATCH["x"], (2, 1)), (jnp.arange(48) % 5 > 0).astype(jnp.float32)
    kept = kept.at[:6].set(jnp.array([0, 1, 0, 1, 0, 1]))
    want = jax.value_and_grad(loss_fn, has_aux=True)(PARAMS["a"], x, kept)
    options = {"has_aux": True, "batch_argnums": (1, 2), "value_and_grad": accumulate}
    for weight in (lambda x, kept: kept.sum(), ""):
        grad_fn = jaxcomp.compressed_value_and_grad(
            loss_fn, mesh, "data", IDENTITY, weight=weight, sums=("",), **options
        )
        close(jax.jit(lambda w, f=grad_fn: f(w, x, kept, key=0))(PARAMS["a"]), want)


def test_adapting_is_of_one_thread_and_undone():
    """Other threads keep JAX's functions, errors too put them back, and uses may be nested."""
    plain = jax.lax.with_sharding_constraint, jax.shard_map, jax.sharding.reshard
    seen = []
    home = jax.sharding.SingleDeviceSharding(jax.devices()[1])

    def other():
        seen.append(jax.jit(lambda x: jax.lax.with_sharding_constraint(x, home))(jnp.ones(2)))

    def trace():
        with adapting.adapted("data") as tracing:
            ours = jax.lax.with_sharding_constraint
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            with adapting.adapted("fsdp"):
                pass
            seen.append(adapting._TRACING.get() is tracing)
            seen.append(jax.lax.with_sharding_constraint is ours is not plain[0])
            raise KeyError

    with pytest.raises(KeyError):
        trace()
    assert seen[0].sharding.device_set == {jax.devices()[1]}
    assert seen[1:] == [True, True]
    assert adapting._TRACING.get() is None
    assert (jax.lax.with_sharding_constraint, jax.shard_map, jax.sharding.reshard) == plain


WRONG = {
    "sum": (lambda w, x: ((x @ w) ** 2).sum(), {}, r"2 times as large.*test_compressed_value"),
    "global": (lambda w, x: ((x @ w) ** 2).sum() / 64, {}, "2 times as large"),
    "count": (lambda w, x: (x @ w).sum() / (x > 0).sum(), {}, "weight='total_weights'"),
    "where": (lambda w, x: (x @ w).mean(where=x[:, :1] > 0), {}, "weight='total_weights'"),
    "names": (lambda w, x: ((x @ w).mean(), {"n": (x > 0).sum()}), {}, r"sums=\('n',\)"),
    "floats": (lambda w, x: ((x @ w).mean(), {"n": x.sum()}), {}, r"sums=\('n',\)"),
    "glob": (lambda w, x: ((x @ w).mean(), {"n": x.sum()}), {"sums": ("m",)}, "names none"),
    "twice": (lambda w, x: ((x @ w).mean(), {"n": x.mean() / len(x)}), {}, "'n' of float32"),
    "number": (lambda w, x: ((x @ w).mean(), {"n": (x > 0).argmax()}), {}, "'n' of int32"),
    "weight": (lambda w, x: ((x @ w).mean(), {"n": x.mean()}), {"weight": "m"}, "names none"),
}


@pytest.mark.parametrize("name", WRONG)
def test_nothing_is_averaged_in_silence(mesh, name):
    loss_fn, options, message = WRONG[name]
    aux = name not in ("sum", "global", "count", "where")
    grad_fn = jaxcomp.compressed_value_and_grad(
        loss_fn, mesh, "data", IDENTITY, has_aux=aux, **options
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda w: grad_fn(w, BATCH["x"], key=0), PARAMS["a"])


def test_a_count_that_is_equal_on_all_workers_is_added_up(mesh):
    def loss_fn(w, x):
        errors = (x @ w) ** 2
        return errors.mean(), {"sum": errors.sum(), "count": jnp.float32(errors.size), "step": 3.0}

    grad_fn = jaxcomp.compressed_value_and_grad(
        loss_fn, mesh, "data", IDENTITY, has_aux=True, sums=("*",)
    )
    (loss, aux), _ = jax.jit(grad_fn)(PARAMS["a"], BATCH["x"], key=0)
    assert aux["step"] == 3  # It does not grow with the batch.
    np.testing.assert_allclose(aux["sum"] / aux["count"], loss, rtol=1e-6)
    grad_fn = jaxcomp.compressed_value_and_grad(
        loss_fn, mesh, "data", IDENTITY, has_aux=True, sums=("sum",)
    )
    with pytest.raises(ValueError, match="count"):  # It would be this worker's.
        jax.eval_shape(lambda w: grad_fn(w, BATCH["x"], key=0), PARAMS["a"])


def test_wrong_arguments(mesh):
    def make(**options):
        loss_fn = options.pop("loss_fn", lambda w, x: (x @ w).mean())
        return jaxcomp.compressed_value_and_grad(loss_fn, mesh, "data", IDENTITY, **options)

    for options, message in (
        ({"sums": "n"}, "tuple of globs"),
        ({"sums": ("n",)}, "has_aux=True"),
        ({"weight": "n"}, "has_aux=True"),
        ({"weight": [1]}, "path of a value"),
        ({"loss_fn": 3}, "loss_fn"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)
    with pytest.raises(ValueError, match="`key` must be the number of the step"):
        make()(PARAMS["a"], BATCH["x"])
    with pytest.raises(ValueError, match="other arguments than `argnums`"):
        make(batch_argnums=0)(PARAMS["a"], BATCH["x"], key=0)
    with pytest.raises(ValueError, match="multiple of the 8 workers"):
        make()(PARAMS["a"], BATCH["x"][:3], key=0)


def test_a_program_for_one_number_of_examples_is_warned_of(mesh):
    grad_fn = jaxcomp.compressed_value_and_grad(
        lambda w, x: (x.reshape(3, 96) @ w).mean(), mesh, "data", IDENTITY
    )
    with pytest.warns(UserWarning, match="cannot be told"):
        jax.eval_shape(lambda w: grad_fn(w, BATCH["x"], key=0), PARAMS["a"])
