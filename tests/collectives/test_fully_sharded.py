"""ZeRO-3: the loss and gradients of sharded parameters are those of whole ones, up to rounding."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxcomp

WIDE, LAYERS = 64, 3
EIGHT, FOUR = jaxcomp.qsgd_inf(bits=8), jaxcomp.qsgd_inf(bits=4)
IDENTITY = jaxcomp.codecs.Identity()
KEYS = jax.random.split(jax.random.key(0), 5)
PARAMS = {
    "embed": jax.random.normal(KEYS[0], (48, WIDE)) / 7,
    "blocks": {
        "w": jax.random.normal(KEYS[1], (LAYERS, WIDE, WIDE)) / 8,
        "b": jnp.zeros((LAYERS, WIDE)),
    },
    "head": {"w": jax.random.normal(KEYS[2], (WIDE, 40)) / 8, "b": jnp.zeros(40)},
}
X, Y = jax.random.normal(KEYS[3], (64, 48)), jax.random.normal(KEYS[4], (64, 40))
ONE = {
    "embed": P(None, "fsdp"),
    "blocks": {"w": P(None, "fsdp"), "b": None},
    "head": {"w": P("fsdp"), "b": P()},
}
TWO = {
    "embed": P(None, ("dcn", "fsdp")),
    "blocks": {"w": P(None, ("fsdp", "dcn")), "b": P()},
    "head": P("fsdp"),
}
BOTH_DIMENSIONS = {
    "embed": P("dcn", "fsdp"),
    "blocks": {"w": P(None, "fsdp", "dcn"), "b": P(None, "fsdp")},
    "head": P(),
}


def loss(params, x, y):
    x = x.astype(params["embed"].dtype) @ params["embed"]

    @jax.checkpoint
    def layer(x, own):
        own = jaxcomp.gathered(own)
        return x + jnp.tanh(x @ own["w"] + own["b"]), None

    x, _ = jax.lax.scan(layer, x, params["blocks"])
    out = x @ params["head"]["w"] + params["head"]["b"]
    return jnp.mean((out.astype(jnp.float32) - y) ** 2)


def make_mesh(kind=AxisType.Auto, **sizes):
    shape, names = tuple(sizes.values()), tuple(sizes)
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def put(mesh, specs, params=PARAMS):
    def is_spec(node):
        return node is None or isinstance(node, P)

    each = jax.tree.map(lambda spec: spec or P(), specs, is_leaf=is_spec)
    each = jax.tree.broadcast(each, params, is_leaf=is_spec)
    return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, each)


def sharded(mesh, names, specs, **settings):
    return jaxcomp.fully_sharded(loss, mesh, names, specs, stacked=("blocks/*",), **settings)


def assert_close(got, want, relative):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        error = np.linalg.norm(np.asarray(one) - np.asarray(other))
        assert error <= relative * np.linalg.norm(np.asarray(other))


@pytest.mark.parametrize(
    ("sizes", "specs", "kind"),
    [
        ({"fsdp": 8}, ONE, AxisType.Auto),
        pytest.param({"dcn": 2, "fsdp": 4}, TWO, AxisType.Explicit, marks=pytest.mark.full),
        pytest.param({"dcn": 2, "fsdp": 4}, BOTH_DIMENSIONS, AxisType.Auto, marks=pytest.mark.full),
    ],
    ids=["one axis", "two axes", "two dimensions"],
)
def test_it_is_the_dense_gradient_without_rounding_and_near_it_with(sizes, specs, kind):
    want = jax.value_and_grad(loss)(PARAMS, X, Y)
    mesh = make_mesh(kind, **sizes)
    params = put(mesh, specs)
    exact = sharded(mesh, tuple(sizes), specs, weights=None)(params, X, Y, key=0)
    assert_close(exact, want, 1e-6)
    for one, home in zip(jax.tree.leaves(exact[1]), jax.tree.leaves(params), strict=True):
        assert one.sharding.is_equivalent_to(home.sharding, one.ndim)
    rounded = sharded(mesh, tuple(sizes), specs, weights=EIGHT)(params, X, Y, key=0)
    assert_close(rounded, want, 0.06)
    assert np.linalg.norm(np.asarray(rounded[1]["embed"] - exact[1]["embed"])) > 0
    gradients = {"weights": None, "gradients": FOUR}
    only = sharded(mesh, tuple(sizes), specs, **gradients)(params, X, Y, key=0)
    np.testing.assert_allclose(only[0], exact[0], rtol=1e-6)
    assert np.linalg.norm(np.asarray(only[1]["embed"] - exact[1]["embed"])) > 0


def test_bytes_of_fully_sharded_are_those_of_the_program():
    """By axis, too; the layers' weights are gathered again in the backward pass."""
    mesh = make_mesh(dcn=2, fsdp=4)
    codecs = {"dcn": FOUR, "fsdp": EIGHT}
    f = sharded(
        mesh, ("dcn", "fsdp"), TWO, weights=codecs, gradients={"dcn": FOUR, "fsdp": IDENTITY}
    )
    params = put(mesh, TWO)
    compiled = jax.jit(f).lower(params, X, Y, key=jnp.uint32(1)).compile()
    moved = jaxcomp.collective_bytes(compiled)
    whole = f.link_bytes(PARAMS)
    small = {"embed": jnp.zeros((0, WIDE)), "head": {"w": jnp.zeros((0, 40)), "b": jnp.zeros(0)}}
    layers = f.link_bytes({**small, "blocks": PARAMS["blocks"]})
    assert set(whole) == {"dcn", "fsdp"}
    said = {name: sum(whole[name]) + layers[name].forward for name in whole}
    loss_itself = 2 * 7 / 8 * 4
    assert sum(moved.values()) == pytest.approx(sum(said.values()) + loss_itself, abs=8)
    by_axis = jaxcomp.collective_bytes(compiled, mesh)
    assert by_axis.pop(("dcn", "fsdp")) == loss_itself
    assert by_axis == pytest.approx(said, abs=8)
    assert not moved.at_least
    dense = sharded(mesh, ("dcn", "fsdp"), TWO, weights=None).link_bytes(PARAMS)
    told = jaxcomp.describe(f, PARAMS)
    assert (told.sent, told.dense) == (whole, dense)
    by_path = {line.path: line for line in told.lines}
    assert by_path["blocks/w"].split == ((), ("fsdp", "dcn"), ())
    assert by_path["head/b"].weights == ("dense", "dense")
    slow, fast = by_path["embed"].weights
    assert slow != fast
    assert "dense" not in (slow, fast)
    assert f"gradients {whole['dcn'].backward:,} (dense {dense['dcn'].backward:,})" in str(told)
    assert whole["dcn"].forward < dense["dcn"].forward / 6
    assert whole["fsdp"].forward < dense["fsdp"].forward / 3


def test_a_second_copy_saves_the_slow_axis_the_second_gathering():
    """Loops gather over hosts once, frozen leaves too; without a policy, twice."""
    mesh, names = make_mesh(dcn=2, fsdp=4), ("dcn", "fsdp")
    base, w = jax.random.normal(KEYS[1], (2, LAYERS, WIDE, WIDE)) / 8
    params = {"base": base, "w": w}
    params = jax.device_put(params, NamedSharding(mesh, P(None, names)))

    def compiled(policy):
        def net(params, x):
            def layer(x, own):
                own = jaxcomp.gathered(own)
                return x + jnp.tanh(x @ (own["base"] + own["w"])), None

            layer = jax.checkpoint(layer, policy=policy)
            return jnp.mean(jax.lax.scan(layer, x[:, :WIDE], params)[0] ** 2)

        codecs = {"weights": EIGHT, "gradients": FOUR}
        f = jaxcomp.fully_sharded(
            net, mesh, names, P(None, names), **codecs, stacked=("*",), frozen=("base",)
        )
        x = jnp.tile(X, (1, 2))
        program = jax.jit(f).lower(params, x, key=0).compile()
        return program(params, x, key=0), jaxcomp.collective_bytes(program, mesh), f

    once, kept, f = compiled(jaxcomp.second_copy)
    twice, again, _ = compiled(None)
    chex.assert_trees_all_equal(once, twice)
    sent = f.link_bytes(params)
    forward, backward = sent["dcn"]
    assert kept["dcn"] == pytest.approx(forward + backward, abs=16)
    assert again["dcn"] == pytest.approx(2 * forward + backward, abs=16)
    assert kept["fsdp"] == again["fsdp"] > sent["fsdp"].forward


def test_one_layer_is_whole_at_a_time():
    """The program's memory beside arguments and results, of sixteen layers."""
    mesh, size, layers = make_mesh(fsdp=8), 256, 16

    def net(params, x):
        @jax.checkpoint
        def layer(x, own):
            return jnp.tanh(x @ jaxcomp.gathered(own)), None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    params = jax.ShapeDtypeStruct((layers, size, size), jnp.float32)
    x = jax.ShapeDtypeStruct((64, size), jnp.float32)
    f = jaxcomp.fully_sharded(
        net, mesh, "fsdp", P(None, "fsdp"), weights=EIGHT, gradients=FOUR, stacked=("",)
    )
    memory = jax.jit(f).lower(params, x, key=jnp.uint32(0)).compile().memory_analysis()
    one = size * size * 4
    activations = layers * 64 / 8 * size * 4
    assert memory.temp_size_in_bytes < 2 * one + 2 * activations
    assert memory.temp_size_in_bytes < layers * one / 4


@pytest.mark.full
def test_types_change_no_bit_and_keys_change_the_noise():
    mesh = make_mesh(fsdp=8)
    params = put(mesh, ONE)
    typed, untyped = (
        sharded(mesh, "fsdp", ONE, weights=EIGHT, gradients=FOUR, check_vma=checked)
        for checked in (True, False)
    )
    want = typed(params, X, Y, key=3)
    jax.tree.map(np.testing.assert_array_equal, untyped(params, X, Y, key=3), want)
    jax.tree.map(np.testing.assert_array_equal, typed(params, X, Y, key=jnp.uint32(3)), want)
    other = typed(params, X, Y, key=4)
    assert (np.asarray(other[1]["embed"]) != np.asarray(want[1]["embed"])).any()


@pytest.mark.full
def test_the_loss_computes_in_bfloat16_and_shards_stay_float32():
    mesh = make_mesh(fsdp=8)
    params = put(mesh, ONE)

    def with_dtypes(params, x, y):
        kinds = {x.dtype for x in jax.tree.leaves((params["embed"], params["head"]))}
        assert kinds == {jnp.dtype("bfloat16")}
        return loss(params, x, y), {"steps": jnp.float32(2)}

    f = jaxcomp.fully_sharded(
        with_dtypes, mesh, "fsdp", ONE, weights=EIGHT, dtype=jnp.bfloat16,
        stacked=("blocks/*",), has_aux=True,
    )  # fmt: skip
    (value, aux), grads = f(params, X, Y, key=0)
    want = jax.value_and_grad(loss)(PARAMS, X, Y)
    assert float(aux["steps"]) == 2
    assert abs(float(value) - float(want[0])) < 0.02 * float(want[0])
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert_close(grads["head"]["w"], want[1]["head"]["w"], 0.08)


@pytest.mark.full
def test_a_loop_of_jit_trains_beside_an_automatic_axis():
    """Other axes stay automatic: the model is sharded over `tp` too, by the compiler."""
    mesh = make_mesh(fsdp=4, tp=2)
    specs = {
        "embed": P("fsdp", "tp"),
        "blocks": {"w": P(None, "fsdp", "tp"), "b": P()},
        "head": {"w": P("fsdp"), "b": None},
    }
    params, tx = put(mesh, specs), optax.adam(3e-3)
    f = sharded(mesh, "fsdp", specs, weights=EIGHT, gradients=FOUR)
    state = tx.init(params)

    @jax.jit
    def step(params, state, number):
        value, grads = f(params, X, Y, key=number)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    with pytest.warns(UserWarning, match="`specs`: 'blocks/w' is split over automatic axes"):
        step.trace(params, state, 0)
    values = []
    for number in range(30):
        params, state, value = step(params, state, number)
        values.append(float(value))
    assert values[-1] < 0.8 * values[0]
    assert params["embed"].sharding.spec == P("fsdp", "tp")
    assert state[0].mu["embed"].sharding.spec == P("fsdp", "tp")


@pytest.mark.parametrize(
    "kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.full)]
)
def test_gradients_lie_where_parameters_do_along_automatic_axes_too(kind, recwarn):
    """Outside of `jit` too, and compression over such axes is not silent."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(kind, AxisType.Auto))
    w = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, P("fsdp", "tp")))

    def net(w, x):
        return jnp.mean((x @ w) ** 2)

    def gradient(weights):
        f = jaxcomp.fully_sharded(net, mesh, "fsdp", P("fsdp", "tp"), weights=weights)
        return f(w, jnp.ones((8, 64)), key=0)[1]

    assert gradient(None).sharding.spec == P("fsdp", "tp")
    assert not [one for one in recwarn if "automatic axes" in str(one.message)]
    with pytest.warns(UserWarning, match="`link_bytes` does not count that gather"):
        assert gradient(EIGHT).sharding.spec == P("fsdp", "tp")


@pytest.mark.full
def test_noise_is_independent_wherever_messages_differ():
    """Over four hosts and two devices each, all with the same gradient, errors average out."""
    w = jnp.zeros((64, 64))
    target = jax.random.normal(jax.random.key(1), (64, 64))

    def net(w, x):
        return jnp.vdot(w, target) * x.mean()

    def error(mesh, names, specs, gradients):
        f = jaxcomp.fully_sharded(net, mesh, names, specs, weights=None, gradients=gradients)
        found = np.stack([np.asarray(f(w, jnp.ones((8, 1)), key=k)[1]) for k in range(8)])
        return float(np.mean((found - np.asarray(target)) ** 2))

    four = jaxcomp.qsgd_inf(bits=4)
    one = error(make_mesh(fsdp=8), "fsdp", P("fsdp"), four)
    mesh, names = make_mesh(dcn=4, fsdp=2), ("dcn", "fsdp")
    inside = {"dcn": IDENTITY, "fsdp": four}
    assert error(mesh, names, P("fsdp"), inside) == pytest.approx(one, rel=0.3)
    both = error(mesh, names, P(names), four)
    assert both < 3 * one

    # Weights are the same bits on all hosts, whose losses would otherwise differ.
    def cubed(w, x):
        own = jax.lax.stop_gradient(jnp.sum(w**3))
        return jnp.sum(w**3), jax.lax.pmax(own, "dcn") - own

    f = jaxcomp.fully_sharded(
        cubed, mesh, names, P("fsdp"), weights=four, has_aux=True, check_vma=False
    )
    (_, spread), _ = f(target, jnp.ones((8, 1)), key=0)
    assert float(spread) == 0.0


def test_each_worker_draws_its_own_dropout():
    mesh = make_mesh(fsdp=8)

    def net(params, x, key):
        return jnp.mean(x @ params), {"drawn": jnp.mean(jax.random.uniform(key) * x[:, 0])}

    w = jnp.ones((64, 8))
    f = jaxcomp.fully_sharded(net, mesh, "fsdp", P("fsdp"), weights=None, has_aux=True)
    key, x = jax.random.key(3), jnp.ones((8, 64))
    (_, aux), _ = f(w, x, key, key=0)
    own = [float(jax.random.uniform(jax.random.fold_in(key, i))) for i in range(8)]
    assert float(aux["drawn"]) == pytest.approx(sum(own) / 8, rel=1e-5)


class Block(nn.Module):
    """A residual layer."""

    @nn.compact
    def __call__(self, x, _):
        return x + jnp.tanh(nn.Dense(WIDE)(x)), None


class Scanned(nn.Module):
    """Linen's own loop over layers, whose parameters are made whole inside."""

    part: bool = False

    @nn.compact
    def __call__(self, x):
        block = Block
        if self.part:
            block = nn.map_variables(block, "params", trans_in_fn=jaxcomp.gathered)
        layers = nn.scan(
            nn.remat(block), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
        )
        x, _ = layers(name="layers")(nn.Dense(WIDE, name="embed")(x), None)
        return nn.Dense(40, name="head")(x)


@pytest.mark.full
def test_linen_with_scanned_layers():
    mesh = make_mesh(fsdp=8)
    params = Scanned().init(jax.random.key(0), X)["params"]

    def of(part):
        def net(params, x, y):
            return jnp.mean((Scanned(part).apply({"params": params}, x) - y) ** 2)

        return net

    def spec(path, x):
        stacked = "layers" in jax.tree_util.keystr(path)
        return P(*[None] * stacked, "fsdp") if x.shape[stacked] % 8 == 0 else P()

    specs = jax.tree_util.tree_map_with_path(spec, params)
    want = jax.value_and_grad(of(False))(params, X, Y)
    own = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, specs)
    for weights, error in ((None, 1e-6), (EIGHT, 0.06)):
        f = jaxcomp.fully_sharded(
            of(True), mesh, "fsdp", specs, weights=weights, stacked=("layers/*",)
        )
        assert_close(f(own, X, Y, key=0), want, error)


@pytest.mark.full
def test_nnx_with_layers_made_whole_inside():
    mesh = make_mesh(fsdp=8)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Linear(48, WIDE, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(WIDE, WIDE, rngs=rngs) for _ in range(2)])
            self.head = nnx.Linear(WIDE, 40, rngs=rngs)

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    params = nnx.to_pure_dict(state)

    def net(params, x, y):
        whole = dict(params, layers={})

        def layer(own, x):
            return jnp.tanh(x @ own["kernel"] + own["bias"])

        head, x = whole["head"], x @ whole["embed"]["kernel"] + whole["embed"]["bias"]
        for number in sorted(params["layers"]):
            own = params["layers"][number]
            x = jax.checkpoint(lambda own, x: layer(jaxcomp.gathered(own), x))(own, x)
        return jnp.mean((x @ head["kernel"] + head["bias"] - y) ** 2)

    def dense(params, x, y):
        replaced = nnx.State(params)
        model = nnx.merge(graph, replaced)
        x = model.embed(x)
        for layer in model.layers:
            x = jnp.tanh(layer(x))
        return jnp.mean((model.head(x) - y) ** 2)

    want = jax.value_and_grad(net)(params, X, Y)
    np.testing.assert_allclose(dense(nnx.to_pure_dict(state), X, Y), want[0], rtol=1e-6)
    specs = jax.tree.map(lambda x: P("fsdp") if x.ndim == 2 else P(), params)
    f = jaxcomp.fully_sharded(net, mesh, "fsdp", specs, weights=EIGHT, inside=("layers/*",))
    assert_close(f(params, X, Y, key=0), want, 0.06)


@pytest.mark.wrong_types
def test_wrong_use_of_fully_sharded():
    mesh = make_mesh(fsdp=8)
    params = put(mesh, ONE)

    def make(axis_name="fsdp", specs=ONE, weights=EIGHT, loss=loss, stacked=("blocks/*",), **more):
        return jaxcomp.fully_sharded(
            loss, mesh, axis_name, specs, weights=weights, stacked=stacked, **more
        )

    def raises(says, call):
        with pytest.raises(ValueError, match=says):
            call()

    raises(
        "averaged over .* already",
        lambda: make(loss=lambda p, x, y: jax.lax.pmean(loss(p, x, y), "fsdp"))(
            params, X, Y, key=0
        ),
    )
    raises("axes of the mesh, .* each once", lambda: make(("fsdp", "fsdp")))
    raises("`dtype` must be a floating dtype", lambda: make(dtype=jnp.int8))
    beside = make_mesh(AxisType.Explicit, fsdp=4, tp=2)
    plain = {"stacked": (), "weights": EIGHT}
    raises(
        "automatic axes beside", lambda: jaxcomp.fully_sharded(loss, beside, "fsdp", P(), **plain)
    )
    raises("name axes of the mesh", lambda: make(specs=P("fdsp"), stacked=())(params, X, Y, key=0))
    raises("a pair of the mean and a tree", lambda: make(has_aux=True)(params, X, Y, key=0))
    twice = {"a": {"b": jnp.ones((8, 8))}, "a/b": jnp.ones((8, 8))}
    raises("got 'a/b' twice", lambda: make(specs=P(), stacked=())(twice, X, Y, key=0))
    nothing = {"w": jnp.ones((64, 40)), "none": None}
    f = make(loss=lambda p, x, y: jnp.mean(y @ p["w"].T), specs=P("fsdp"), stacked=())
    assert f(nothing, X, Y, key=0)[1]["none"] is None
    blcks = make(inside=("blcks/*",))
    raises("globs that match leaves, got 'blcks", lambda: blcks(params, X, Y, key=0))
    raw = jnp.zeros(2, jnp.uint32)
    raises("a random key must be a typed one", lambda: make()(params, X, raw, key=0))
    pair = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    f = jaxcomp.fully_sharded(loss, pair, "fsdp", P(), weights=None, stacked=("blocks/*",))
    raises("a random key must be a typed one", lambda: f(PARAMS, X, raw, key=0))
    for use in (lambda w: w * 2, lambda w: w.T, lambda w: jnp.ones((8, 8)) @ w, jnp.sum):
        with pytest.raises((ValueError, AttributeError), match="`blocks/w` must be made whole"):
            make(loss=lambda p, x, y, use=use: jnp.sum(use(p["blocks"]["w"])))(params, X, Y, key=0)
    residual = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())
    raises("`axis_name` must be axes of the mesh", lambda: make("data"))
    raises("`weights` must be a codec or a Policy, since", lambda: make(weights=residual))
    raises("`gradients` must name each axis", lambda: make(gradients={"dcn": FOUR}))
    raises("`stacked` must be a tuple of glob", lambda: make(stacked="blocks/*"))
    with pytest.warns(UserWarning, match="is biased, and there is no memory"):
        make(gradients=jaxcomp.top_k(fraction=0.1))
    raises("`key` must be the number of the step", lambda: make()(params, X, Y))
    raises("that 8 workers divide, got '0' of shape", lambda: make()(params, X[:60], Y[:60], key=0))
    raises(
        "one number, got shape", lambda: make(loss=lambda p, x, y: x.sum(1))(params, X, Y, key=0)
    )
    uneven = {**ONE, "head": {"w": P(None, "fsdp"), "b": P("fsdp")}}
    make(specs=uneven)(params, X, Y, key=0)
    raises(
        "must divide every leaf evenly",
        lambda: make(specs={**ONE, "embed": P(("fsdp",)), "head": P("fsdp"), "blocks": P()})(
            dict(params, embed=jnp.ones((44, WIDE))), X, Y, key=0
        ),
    )
    raises(
        "must not split the first axis of 'blocks/b'",
        lambda: make(specs={**ONE, "blocks": {"w": P(), "b": P("fsdp")}})(
            dict(params, blocks={"w": jnp.ones((8, WIDE, WIDE)), "b": jnp.ones((8, WIDE))}),
            X,
            Y,
            key=0,
        ),
    )
    raises("prefix of one", lambda: make(specs={"embed": P()})(params, X, Y, key=0))
    raises(
        "'head/w' of int32",
        lambda: make(specs=P(), stacked=())({"head": {"w": jnp.ones((8, 8), int)}}, X, Y, key=0),
    )
    raises(
        "`blocks/w` must be made whole",
        lambda: make(loss=lambda p, x, y: jnp.sum(p["blocks"]["w"]))(params, X, Y, key=0),
    )
    raises(
        "got all layers of 'blocks/",
        lambda: make(loss=lambda p, x, y: jnp.sum(jaxcomp.gathered(p["blocks"])["w"]))(
            params, X, Y, key=0
        ),
    )
    raises(
        "each part once",
        lambda: make(
            loss=lambda p, x, y: jax.lax.scan(
                lambda c, own: (c + jaxcomp.gathered([own, own])[0]["w"].sum(), None),
                0.0,
                p["blocks"],
            )[0]
        )(params, X, Y, key=0),
    )
