"""LoRA with Tunix' `PeftTrainer`: gradients of adapters cross hosts compressed, by a subclass."""

import argparse
import json
import time

import jax
import numpy as np
import optax
import qwix
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tunix.models.llama3 import model as llama
from tunix.sft import hooks, peft_trainer, utils

import jaxcomp

jax.config.update("jax_platforms", "cpu")  # Eight simulated devices: leave these two lines out
jax.config.update("jax_num_cpu_devices", 8)  # where there are real ones.

CODECS = {"identity": jaxcomp.codecs.Identity(), "qsgd": jaxcomp.qsgd_inf(bits=4)}
CODECS |= {"sign": jaxcomp.sign()}
BATCH, LENGTH, VOCABULARY = 16, 32, 64
CONFIG = llama.ModelConfig(
    num_layers=2, vocab_size=VOCABULARY, embed_dim=256, hidden_dim=512, num_heads=4, head_dim=64,
    num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5,
)  # fmt: skip
mesh = jax.make_mesh((2, 4, 1), ("data", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)


class CompressedTrainer(peft_trainer.PeftTrainer):  # Compressed: this class, and its name below.
    """Each of the hosts of `data` sends its gradients of the adapters compressed."""

    def with_codec(self, codec):
        params = nnx.state(self.model, nnx.LoRAParam)
        self.grad_fn = jaxcomp.compressed_value_and_grad(
            lambda model, inputs: self.loss_fn(model, **inputs), mesh, "data", codec,
            weight=lambda inputs: inputs["input_mask"][:, 1:].sum(),
            param_specs=nnx.get_partition_spec(params), wrt=nnx.LoRAParam,
        )  # fmt: skip
        self.optimizer.memory = nnx.Variable(self.grad_fn.init(params))
        return self

    def create_train_step_fn(self):
        def step(model, optimizer, inputs):
            inputs, memory = self.gen_model_input_fn(inputs), optimizer.memory.get_value()
            loss, grads, memory = self.grad_fn(model, inputs, memory=memory)
            optimizer.memory.set_value(memory)
            optimizer.update(model, grads)
            return loss, None, optax.global_norm(grads)

        return step


class Record(hooks.TrainingHooks):
    """The losses, and when the first of them was there."""

    losses, seconds, began = [], 0.0, 0.0
    on_train_end = on_train_step_start = on_eval_step_start = on_eval_step_end = lambda *args: None

    def on_train_start(self, train_ctx):
        self.began = time.perf_counter()

    def on_train_step_end(self, train_ctx, train_step, train_loss):
        self.losses.append(float(train_loss))
        self.seconds = self.seconds or time.perf_counter() - self.began


def batches(seed, steps):
    """Sequences that count up, of unequal lengths."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        start, stride = rng.integers(1, VOCABULARY, (BATCH, 1)), rng.integers(1, 5, (BATCH, 1))
        tokens = (start + stride * np.arange(LENGTH)) % (VOCABULARY - 1) + 1
        mask = np.arange(LENGTH) < rng.integers(LENGTH // 4, LENGTH, (BATCH, 1))
        yield peft_trainer.TrainingInput(input_tokens=tokens * mask, input_mask=mask)


def inputs_of(example):
    positions = utils.build_positions_from_mask(example.input_mask)
    mask = utils.make_causal_attn_mask(example.input_mask)
    return {**vars(example), "images": None, "positions": positions, "attention_mask": mask}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codec", choices=("dense", *CODECS), default="qsgd")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    lora = qwix.LoraProvider(module_path=".*(proj|embedder|lm_head).*", rank=32, alpha=32.0)
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=10**6, max_steps=args.steps, data_sharding_axis=("data", "fsdp")
    )
    with mesh:
        model = llama.Llama3(CONFIG, rngs=nnx.Rngs(args.seed))
        model = qwix.apply_lora_to_model(model, lora, **model.get_model_input())
        state = nnx.state(model)
        nnx.update(model, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
        kind = peft_trainer.PeftTrainer if args.codec == "dense" else CompressedTrainer
        trainer = kind(model, optax.adam(3e-3), config).with_gen_model_input_fn(inputs_of)
        if args.codec != "dense":
            trainer = trainer.with_codec(CODECS[args.codec])
        record = Record()
        trainer.with_training_hooks(record)
        trainer.train(batches(args.seed, args.steps))
        step, home = trainer.create_train_step_fn(), NamedSharding(mesh, P(("data", "fsdp")))
        example = jax.device_put(next(batches(0, 1)), home)
        compiled = nnx.jit(step).lower(model, trainer.optimizer, example).compile()
    result = {"program": "tunix_lora", "codec": args.codec, "seed": args.seed}
    result |= {"losses": record.losses, "seconds_to_first_step": round(record.seconds, 2)}
    sent = jaxcomp.collective_bytes(compiled, mesh=mesh)
    result |= {"bytes": {str(axis): n for axis, n in sent.items()}, "lines": 21}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
