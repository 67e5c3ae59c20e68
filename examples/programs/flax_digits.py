"""Flax's nnx under `nnx.jit` with automatic sharding: gradients cross hosts compressed."""

import argparse
import json
import time

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from sklearn import datasets

import jaxcomp

jax.config.update("jax_platforms", "cpu")  # Eight simulated devices: leave these two lines out
jax.config.update("jax_num_cpu_devices", 8)  # where there are real ones.

CODECS = {
    "identity": jaxcomp.codecs.Identity(),
    "qsgd": jaxcomp.qsgd_inf(bits=4),
    "sign": jaxcomp.sign(),
}
BATCH = 64
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


class Net(nnx.Module):
    """The first layer's columns and the second one's rows are split over `model`."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()

        def split(*names):
            return nnx.with_partitioning(init, names)

        self.first = nnx.Linear(64, 256, kernel_init=split(None, "model"), rngs=rngs)
        self.second = nnx.Linear(256, 128, kernel_init=split("model", None), rngs=rngs)
        self.last = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.second(nnx.relu(self.first(x)))))


def loss_fn(model, batch):
    logits = model(batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, logits


@nnx.jit
def create(key):
    model = Net(nnx.Rngs(key))
    state = nnx.state(model)
    nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def make_step(grad_fn):
    @nnx.jit
    def train_step(model, optimizer, batch, memory):
        if grad_fn is None:
            (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
        else:
            (loss, logits), grads, memory = grad_fn(model, batch, memory=memory)  # Compressed.
        optimizer.update(model, grads)
        return loss, (logits.argmax(-1) == batch["label"]).mean(), memory

    return train_step


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codec", choices=("dense", *CODECS), default="qsgd")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    images, labels = datasets.load_digits(return_X_y=True)
    rng = np.random.default_rng(args.seed)
    with jax.set_mesh(mesh):
        model, optimizer = create(jax.random.key(args.seed))
    grad_fn = memory = None
    if args.codec != "dense":
        params = nnx.state(model, nnx.Param)
        grad_fn = jaxcomp.compressed_value_and_grad(  # Compressed.
            loss_fn, mesh, "data", CODECS[args.codec], has_aux=True,
            param_specs=nnx.get_partition_spec(params),
        )  # fmt: skip
        memory = grad_fn.init(params)  # Compressed.
    train_step = make_step(grad_fn)
    losses, seconds, began = [], 0.0, time.perf_counter()
    for number in range(args.steps):
        rows = rng.permutation(len(images))[:BATCH]
        batch = {"image": np.asarray(images[rows] / 16, np.float32), "label": labels[rows]}
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        loss, _, memory = train_step(model, optimizer, batch, memory)
        losses.append(float(loss))
        seconds = seconds if number else time.perf_counter() - began
    step = train_step.lower(model, optimizer, batch, memory).compile()
    result = {"program": "flax_digits", "codec": args.codec, "seed": args.seed}
    result |= {"losses": losses, "seconds_to_first_step": round(seconds, 2)}
    sent = jaxcomp.collective_bytes(step, mesh=mesh)
    result |= {"bytes": {str(axis): n for axis, n in sent.items()}, "lines": 6}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
