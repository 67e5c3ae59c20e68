"""Keras' `fit` on digits: eight devices average their gradients compressed, by one line."""

import argparse
import json
import os
import time

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from sklearn import datasets

import jaxcomp
from jaxcomp.adapters.keras import compress  # Compressed.

jax.config.update("jax_platforms", "cpu")  # Eight simulated devices: leave these two lines out
jax.config.update("jax_num_cpu_devices", 8)  # where there are real ones.

CODECS = {
    "identity": jaxcomp.codecs.Identity(),
    "qsgd": jaxcomp.qsgd_inf(bits=4),
    "sign": jaxcomp.sign(),
}
BATCH, EXAMPLES = 64, 1408  # The rest is for validation.


class FirstStep(keras.callbacks.Callback):
    """The seconds until the first step is done, with compilation."""

    seconds = None

    def on_train_begin(self, logs=None):
        self.began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        if self.seconds is None:
            jax.block_until_ready(logs)
            self.seconds = time.perf_counter() - self.began


def make_model():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(256, activation="relu"),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def bytes_of_step(model, x, y):
    """Bytes that one device sends in a compiled step."""
    kinds = ("trainable_variables", "non_trainable_variables")
    state = [[v.value for v in getattr(model, kind)] for kind in kinds]
    state += [[v.value for v in model.optimizer.variables]]
    state += [[v.value for v in model.metrics_variables]]
    layout = keras.distribution.distribution().get_data_layout
    data = [jax.device_put(a[:BATCH], layout(a[:BATCH].shape).backend_layout) for a in (x, y)]
    step = jax.jit(model.train_step).lower(tuple(state), tuple(data)).compile()
    sent = jaxcomp.collective_bytes(step, mesh={"batch": jax.device_count()})
    return {str(axis): n for axis, n in sent.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codec", choices=("dense", *CODECS), default="qsgd")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=110)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    x, y = datasets.load_digits(return_X_y=True)
    x = np.asarray(x / 16, np.float32)
    model = make_model()
    if args.codec != "dense":
        model = compress(model, CODECS[args.codec])  # Compressed.
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    first = FirstStep()
    history = model.fit(
        x[:EXAMPLES], y[:EXAMPLES], batch_size=BATCH, callbacks=[first], verbose=2,
        epochs=max(1, args.steps * BATCH // EXAMPLES),
    ).history  # fmt: skip
    held = (len(x) - EXAMPLES) // 8 * 8
    print(model.evaluate(x[-held:], y[-held:], batch_size=held, verbose=0, return_dict=True))
    result = {"program": "keras_fit", "codec": args.codec, "seed": args.seed}
    result |= {"losses": history["loss"], "seconds_to_first_step": round(first.seconds or 0, 2)}
    result |= {"bytes": bytes_of_step(model, x, y), "lines": 2}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
