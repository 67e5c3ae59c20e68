"""What to do where one bit an element diverges: ways of training a small tagger, and where they end.

A transformer learns to tag tokens, most of which are rare, as words are. Rows of the embedding that
a batch does not touch have no gradient, which one bit cannot say, and Adam takes full steps by it.

    python benchmarks/signs.py --steps 300 --rates 0.001 0.003 0.01
"""

import argparse
import pathlib
import statistics
import sys
import time

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
import optax

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import byte_lm_model
import training

import jaxcomp

TOKENS, TAGS, CONTEXT, BATCH = 256, 16, 32, 64
SIGN, TWO_SHOT = jaxcomp.sign(), jaxcomp.TwoShot
LINK = jaxcomp.Link(SIGN, jaxcomp.Residual())


def adamw(rate, **settings):
    return optax.adamw(rate, **{"b1": 0.9, "b2": 0.98, "eps": 1e-9, "weight_decay": 0.1, **settings})


def after_mean(codec, **settings):
    return lambda rate, steps: optax.chain(
        jaxcomp.compressed_mean(codec(steps) if callable(codec) else codec, training.AXIS),
        adamw(rate, **settings),
    )


def embedding(codec):
    rules = (jaxcomp.Rule("*embedding/kernel", codec),)
    return jaxcomp.Policy(SIGN, rules=rules)


def phases(steps):
    dense = jaxcomp.Dense()
    return jaxcomp.Phases(((0, dense), (steps // 5, TWO_SHOT(LINK, LINK))))

WAYS = {
    "dense": after_mean(jaxcomp.Dense()),
    "qsgd_inf4": after_mean(jaxcomp.qsgd_inf(bits=4)),
    "blockwise4": after_mean(jaxcomp.blockwise(bits=4)),
    "eden2": after_mean(jaxcomp.eden(bits=2, rotations=2)),
    "sign": after_mean(SIGN),
    "sign_eps": after_mean(SIGN, eps=1e-4),
    "sign_b2": after_mean(SIGN, b2=0.999),
    "sign_embdense": after_mean(embedding(None)),
    "sign_emb8": after_mean(embedding(jaxcomp.qsgd_inf(bits=4))),
    "sign_bucket64": after_mean(jaxcomp.sign(bucket_size=64)),
    "sign_gather": after_mean(jaxcomp.Gather(LINK)),
    "sign_mom": lambda rate, steps: optax.chain(jaxcomp.compressed_mean(SIGN, training.AXIS), optax.clip_by_global_norm(1.), optax.sgd(100*rate, momentum=.9)),
    "top_k": after_mean(jaxcomp.top_k(fraction=0.01)),
    "one_bit_adam": lambda rate, steps: jaxcomp.one_bit_adam(training.AXIS, learning_rate=rate, freeze_step=steps//5, b2=.98, weight_decay=.1),
    "cd_adam": lambda rate, steps: jaxcomp.cd_adam(SIGN, training.AXIS, learning_rate=rate),
    "cd_adam_4": lambda rate, steps: jaxcomp.cd_adam(jaxcomp.blockwise(bits=4), training.AXIS, learning_rate=rate),
    "ps4": after_mean(jaxcomp.PowerIteration(rank=4)),
}


def batch_of(rng, tables):
    chances = 1 / np.arange(1, TOKENS + 1)
    tokens = rng.choice(TOKENS, size=(BATCH, CONTEXT), p=chances / chances.sum()).astype(np.int32)
    tags = tables[tokens] + tables[np.roll(tokens, 1, axis=1)]
    return tokens, (tags % TAGS).astype(np.int32)


def run(way, rate, steps, warm, seed=0):
    mesh = training.make_mesh(jax.devices())
    model = byte_lm_model.ByteModel(layers=1, width=64)
    tables = np.random.default_rng(99).integers(TAGS, size=TOKENS)
    rng = np.random.default_rng(seed)
    up = max(1, int(warm * steps))
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, up, steps, rate/10)
    tx = WAYS[way](schedule, steps)
    batch = batch_of(rng, tables)
    params = model.init(jax.random.key(seed), batch[0][:1])
    params = jaxcomp.place(params, mesh, training.AXIS)
    state = jaxcomp.init_state(tx, params, mesh, training.AXIS)
    step = training.build_step(model, tx, mesh)
    losses, t = [], time.time()
    for _ in range(steps):
        params, state, loss = step(params, state, training.put(batch, mesh))
        losses.append(float(loss)); batch = batch_of(rng, tables)
    return losses[0], max(losses), statistics.mean(losses[-20:]), time.time()-t


if __name__ == "__main__":
    import warnings; warnings.simplefilter("ignore")
    a = argparse.ArgumentParser(); a.add_argument("--ways", nargs="+", default=list(WAYS)); a.add_argument("--rates", nargs="+", type=float, default=[1e-2]); a.add_argument("--steps", type=int, default=300); a.add_argument("--warm", type=float, default=.1)
    o = a.parse_args()
    for w in o.ways:
        for r in o.rates:
            print(w, r, *("%.3f" % x for x in run(w, r, o.steps, o.warm)), flush=True)
