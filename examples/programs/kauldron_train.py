"""Kauldron's `Trainer` on digits: eight devices average their gradients compressed, by a step."""

import argparse
import dataclasses
import json
import tempfile
import time
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from kauldron import kd, kontext
from kauldron.train import metric_writer, train_step
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


@dataclasses.dataclass(kw_only=True, eq=False, frozen=True)
class CompressedStep(kd.train.TrainStep):  # Compressed: this class, and `trainstep=` below.
    """The memory of the codec is beside the state of the optimizer."""

    codec: Any

    @property
    def grad_fn(self):
        def loss_fn(params, context, rngs, batch):
            loss, context = train_step.forward_with_loss(
                context.replace(params=params, batch=batch),
                model=self.model, losses=self.aux.losses, rngs=rngs, is_training=True,
            )  # fmt: skip
            return loss, context

        return jaxcomp.compressed_value_and_grad(
            loss_fn, kd.sharding.DEVICES_MESH, "devices", self.codec,
            has_aux=True, sums=("loss_states/*",), key_argnums=2,
        )  # fmt: skip

    def _init_optimizer(self, state):
        memory = self.grad_fn.init(state.params)
        state = super()._init_optimizer(state)
        return state.replace(opt_state=(state.opt_state, memory))

    def _step(self, state, batch):
        opt_state, memory = state.opt_state
        context = kd.train.Context(step=state.step, batch=None, collections=state.collections)
        rngs = self.rng_streams.train_rngs(state.step)
        rngs = {name: key.rng for name, key in rngs.items()}
        (_, context), grads, memory = self.grad_fn(
            state.params, context, rngs, batch, memory=memory
        )
        updates, opt_state = self.optimizer.update(grads, opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        context = context.replace(grads=grads, updates=updates, opt_state=opt_state)
        state = state.replace(
            step=state.step + 1, params=params, opt_state=(opt_state, memory),
            collections=context.collections,
        )  # fmt: skip
        return state, self.aux.update_context(context)


class Net(nn.Module):
    image: kontext.Key = "batch.image"

    @nn.compact
    def __call__(self, image):
        x = nn.relu(nn.Dense(256)(image))
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x)))


class Record(metric_writer.NoopWriter):
    """The losses, and when the first of them was there."""

    losses, times = [], []

    def write_context_structure(self, step, trainer):
        self.times.append(time.perf_counter())

    def write_step_metrics(self, *, aux, **kwargs):
        self.losses.append(float(aux.compute().loss_values["losses/total"]))
        self.times.append(time.perf_counter())


def load():
    x, y = datasets.load_digits(return_X_y=True)
    return {"image": np.asarray(x / 16, np.float32), "label": np.asarray(y[:, None], np.int32)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codec", choices=("dense", *CODECS), default="qsgd")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    dense = args.codec == "dense"
    loss = kd.losses.SoftmaxCrossEntropyWithIntLabels(logits="preds", labels="batch.label")
    record = Record()
    with tempfile.TemporaryDirectory() as folder:
        trainer = kd.train.Trainer(
            seed=args.seed, workdir=folder, model=Net(), optimizer=optax.adam(1e-3),
            train_ds=kd.data.InMemoryPipeline(loader=load, batch_size=BATCH, shuffle=True),
            train_losses={"digits": loss}, num_train_steps=args.steps - 1, log_metrics_every=1,
            writer=record,
            trainstep=kd.train.TrainStep() if dense else CompressedStep(codec=CODECS[args.codec]),
        )  # fmt: skip
        state, _ = trainer.train()
    batch = kd.sharding.device_put(next(iter(trainer.train_ds)), kd.sharding.FIRST_DIM)
    step = kd.train.TrainStep.step.lower(trainer.trainstep, state, batch, return_losses=True)
    result = {"program": "kauldron_train", "codec": args.codec, "seed": args.seed}
    seconds = record.times[1] - record.times[0]
    result |= {"losses": record.losses, "seconds_to_first_step": round(seconds, 2)}
    sent = jaxcomp.collective_bytes(step.compile(), mesh=kd.sharding.DEVICES_MESH)
    result |= {"bytes": {str(axis): n for axis, n in sent.items()}, "lines": 37}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
