"""Keras' `fit`, compressed, beside its own; where Keras is installed, with its JAX backend."""

import jax
import numpy as np
import pytest

import jaxcomp
from jaxcomp.adapters.keras import compress

keras = pytest.importorskip("keras")
if keras.backend.backend() != "jax":
    pytest.skip("needs KERAS_BACKEND=jax", allow_module_level=True)

IDENTITY, SIGN = jaxcomp.codecs.Identity(), jaxcomp.sign()
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(256, 64)).astype("float32"), RNG.integers(0, 10, 256)
WEIGHTS = RNG.uniform(size=256).astype("float32")
TOKENS = RNG.integers(1, 50, (128, 12)) * (np.arange(12) < RNG.integers(1, 12, (128, 1)))


@pytest.fixture(autouse=True)
def distribution():
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    yield
    keras.distribution.set_distribution(None)
    keras.mixed_precision.set_global_policy("float32")


def dense():
    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(128, "relu", kernel_regularizer="l2", name="in")(inputs)
    return keras.Model(inputs, keras.layers.Dense(10, name="out", dtype="float32")(hidden))


def masked():
    layers = keras.layers
    kinds = [layers.Embedding(50, 64, mask_zero=True), layers.LSTM(64, return_sequences=True)]
    return keras.Sequential([keras.Input((12,), dtype="int32"), *kinds, layers.Dense(50)])


def outputs():
    inputs = keras.Input((64,))
    hidden = keras.layers.Dense(128, "relu")(inputs)
    return keras.Model(
        inputs, {n: keras.layers.Dense(10, name=n)(hidden) for n in ("first", "second")}
    )


def compiled(model, reduction="sum_over_batch_size", **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"], **options)
    return model


def trained(make, codec, x, y, reduction="sum_over_batch_size", **options):
    keras.utils.set_random_seed(1)
    model = compiled(make() if codec is None else compress(make(), codec), reduction)
    found = model.fit(x, y, batch_size=32, epochs=2, verbose=0, shuffle=False, **options)
    return model, found.history


BY_WEIGHT = {"reduction": "mean_with_sample_weight"}
CASES = {
    "plain": (dense, X, Y, {}),
    "sample weights": (dense, X, Y, {"sample_weight": WEIGHTS}),
    "class weights": (dense, X, Y, {"class_weight": {n: n / 5 for n in range(10)}}),
    "sum of weights": (dense, X, Y, {"sample_weight": WEIGHTS, **BY_WEIGHT}),
    "mask": (masked, TOKENS, TOKENS, {}),
    "mask, by weight": (masked, TOKENS, TOKENS, BY_WEIGHT),
    "outputs": (outputs, X, {"first": Y, "second": Y[::-1]}, {"validation_split": 0.25}),
}


@pytest.mark.parametrize("name", CASES)
def test_fit_without_rounding_is_that_of_keras(name):
    make, x, y, options = CASES[name]
    if name == "outputs":
        pair = [trained_outputs(codec, x, y, options) for codec in (None, IDENTITY)]
    else:
        pair = [trained(make, codec, x, y, **options)[1] for codec in (None, IDENTITY)]
    assert pair[0].keys() == pair[1].keys()
    for key, values in pair[0].items():
        np.testing.assert_allclose(pair[1][key], values, rtol=1e-4, atol=1e-6)


def trained_outputs(codec, x, y, options):
    keras.utils.set_random_seed(1)
    model = outputs() if codec is None else compress(outputs(), codec)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", {"first": loss, "second": loss}, metrics={"first": "accuracy"})
    return model.fit(x, y, batch_size=32, verbose=0, shuffle=False, **options).history


def test_a_compiled_model_keeps_its_compilation():
    keras.utils.set_random_seed(1)
    model = compress(compiled(dense()), IDENTITY)
    found = model.fit(X, Y, batch_size=32, epochs=2, verbose=0, shuffle=False).history
    assert found == trained(dense, IDENTITY, X, Y)[1]


def test_memory_is_saved_and_moves_to_other_devices(tmp_path):
    model, before = trained(dense, SIGN, X, Y)
    assert before["loss"][1] < before["loss"][0]
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip_of(model, again))
    after = [m.fit(X, Y, batch_size=32, verbose=0, shuffle=False).history for m in (model, again)]
    assert after[0] == after[1]
    keras.distribution.set_distribution(None)
    alone = keras.saving.load_model(tmp_path / "model.keras")
    assert alone.fit(X, Y, batch_size=32, verbose=0).history["loss"][0] < before["loss"][1]


def zip_of(one, two):
    return zip(one.variables, two.variables, strict=True)


def test_parts_are_sharded_over_the_model():
    mesh = keras.distribution.DeviceMesh((4, 2), ("data", "model"))
    layout = keras.distribution.LayoutMap(mesh)
    layout["in/kernel"] = (None, "model")
    parallel = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="data")
    keras.distribution.set_distribution(parallel)
    want, found = (trained(dense, codec, X, Y)[1] for codec in (None, IDENTITY))
    np.testing.assert_allclose(found["loss"], want["loss"], rtol=1e-5)
    model, _ = trained(dense, SIGN, X, Y)
    specs = {tuple(v.value.sharding.spec) for v in model._memory}
    assert ("data", "model") in specs


def test_loss_scaling_sees_the_overflow_of_one_device():
    keras.mixed_precision.set_global_policy("mixed_float16")
    x = X.copy()
    x[5] *= 3e4
    scales = []
    for codec in (None, IDENTITY, SIGN):
        model, _ = trained(dense, codec, x, Y)
        assert all(np.isfinite(np.asarray(v.value)).all() for v in model.variables)
        scales.append(float(model.optimizer.dynamic_scale))
    assert scales[0] == scales[1] == scales[2] < 2**15


def test_seeds_and_statistics_are_one_for_all_devices():
    def make():
        layers = keras.layers
        kinds = [layers.Dense(128), layers.BatchNormalization(), layers.Dropout(0.5, seed=3)]
        return keras.Sequential([keras.Input((64,)), *kinds, layers.Dense(10)])

    (want, _), (found, _) = (trained(make, codec, X, Y) for codec in (None, IDENTITY))
    states = [v for m in (want, found) for v in m.variables if v.name == "seed_generator_state"]
    np.testing.assert_array_equal(*[v.value for v in states])
    means = [v for m in (want, found) for v in m.variables if v.name == "moving_mean"]
    np.testing.assert_allclose(*[v.value for v in means], atol=0.1)
    assert all(v.value.sharding.is_fully_replicated for v in (*states, *means))


def test_a_mesh_of_its_own():
    keras.distribution.set_distribution(None)
    with pytest.raises(ValueError, match="`mesh` and `axis_name` must be given"):
        compress(dense(), SIGN)
    keras.utils.set_random_seed(1)
    model = compiled(compress(dense(), SIGN, mesh=jax.make_mesh((8,), ("d",)), axis_name="d"))
    losses = model.fit(X, Y, batch_size=32, epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]


class OwnStep(keras.Model):
    def train_step(self, state, data):
        return super().train_step(state, data)


def test_wrong_models_and_batches():
    made = keras.Input((64,))
    for model, options, message in (
        (keras.Sequential([keras.layers.Dense(3)]), {}, "`model` must be built"),
        (OwnStep(made, keras.layers.Dense(3)(made)), {}, "Keras' own train_step"),
        (dense(), {"axis_name": "rows"}, "`axis_name` must be an axis of the mesh"),
        (3, {}, "must be a keras.Model"),
    ):
        with pytest.raises(ValueError, match=message):
            compress(model, IDENTITY, **options)
    for count, size, message in ((256, 60, "batches of 60"), (100, 32, "of 100 examples")):
        with pytest.raises(ValueError, match=message):
            compiled(compress(dense(), IDENTITY)).fit(X[:count], Y[:count], batch_size=size)
    with pytest.raises(ValueError, match="`loss` must be a mean over the batch"):
        trained(dense, IDENTITY, X, Y, reduction="sum")
