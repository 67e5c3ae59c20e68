"""TernGrad in training, and its performance model.

The networks and the driver are in `networks.py`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxcomp
from claims import networks, scores
from claims.claim import PART, Change, Claim, Judged, decide
from claims.descent import least
from claims.networks import AXIS, Method, Plan, Rate, everywhere, mean
from jaxcomp import planning

CNN = Plan(500, (0.01, 0.02, 0.05, 0.1, 0.2))
CLIP = 2.5
_WEN = (
    "Wen, Xu, Yan, Wu, Wang, Chen and Li, TernGrad: ternary gradients to reduce communication in "
    "distributed deep learning, 2017"
)


def _clipped(grads: Any) -> Any:
    """Each leaf within 2.5 of its own standard deviations."""

    def clip(leaf: Any) -> Any:
        most = CLIP * leaf.std()
        return jnp.clip(leaf, -most, most)

    return jax.tree.map(clip, grads)


def _by_paper(rate: Rate, key: Any) -> Any:
    """Clips at each worker's own deviation, and then shares the largest scaler."""
    codec = everywhere(jaxcomp.terngrad(clip=None, shared=True))
    return optax.chain(
        optax.stateless(lambda grads, params: _clipped(grads)),
        jaxcomp.compressed_mean(codec, AXIS, key=key),
        networks.momentum(rate),
    )


def _but_the_last(codec: jaxcomp.Codec) -> jaxcomp.Policy:
    """Every leaf but those of the last layer, which stays in 32 bits, as in the paper."""
    return dataclasses.replace(everywhere(codec), rules=(jaxcomp.Rule("head*", None),))


WAYS: dict[str, Method] = {
    "dense": mean(jaxcomp.Dense()),
    "clipped": mean(everywhere(jaxcomp.terngrad())),
    "not clipped": mean(everywhere(jaxcomp.terngrad(clip=None))),
    "shared scaler, clipped at the shared value": mean(everywhere(jaxcomp.terngrad(shared=True))),
    "shared scaler, clipped at each worker's own": _by_paper,
    "clipped, last layer dense": mean(_but_the_last(jaxcomp.terngrad())),
    "not clipped, last layer dense": mean(_but_the_last(jaxcomp.terngrad(clip=None))),
}


def _train() -> dict[str, Any]:
    """Layer-wise scalers, and one for the whole gradient."""
    task = networks.cnn()
    found = networks.compare(WAYS, task, CNN)
    ways = {"one scaler for all": WAYS["clipped"], "one, not clipped": WAYS["not clipped"]}
    found["methods"] |= networks.compare(ways, networks.flat(task), CNN)["methods"]
    return {"numbers": found}


def _words(numbers: dict[str, Any], *names: str) -> str:
    return ", ".join(scores.told(numbers, name) for name in names)


def _clip_judged(numbers: dict[str, Any]) -> Judged:
    clipped, free = "clipped, last layer dense", "not clipped, last layer dense"
    kept = scores.equal(numbers, clipped, "dense")
    worse = scores.better(numbers, clipped, free)
    gain = scores.gain(numbers, free, clipped)
    others = [name for name in WAYS if name not in ("dense", clipped, free)]
    words = (
        f"without clipping {gain:+.2f} points; {_words(numbers, 'dense', clipped, free)}; every "
        f"layer ternary: {_words(numbers, *others)}"
    )
    margin = least(scores.as_good(numbers, clipped, "dense"), scores.surely(numbers, clipped, free))
    return Judged(words, decide(kept and worse, kept or worse), margin)


def _layers_judged(numbers: dict[str, Any]) -> Judged:
    pairs = (("clipped", "one scaler for all"), ("not clipped", "one, not clipped"))
    better = [scores.better(numbers, *pair) for pair in pairs]
    words = _words(numbers, *(name for pair in pairs for name in pair))
    margin = least(*(scores.surely(numbers, *pair) for pair in pairs))
    return Judged(words, decide(all(better), any(better)), margin)


MODELS = {
    # Parameters, multiplications of a forward pass, images of a worker's batch.
    "AlexNet": (61.0e6, 0.72e9, 128),
    "VGG-A": (132.9e6, 7.6e9, 64),
    "GoogLeNet": (7.0e6, 1.5e9, 128),
}
SPEED = 3e12
"""Operations a second that training reaches on a worker: our assumption for a GPU of 2017."""
LINKS = {"1 Gbit/s": (1.25e8, 5e-5), "100 Gbit/s": (1.25e10, 2e-6)}
WORKERS = (2, 4, 8, 16, 32, 64, 128, 256, 512)


def _scale() -> dict[str, Any]:
    """The speed-up of a step by ternary gradients over N workers, from the link model."""
    codec = jaxcomp.terngrad(clip=None, shared=True)
    found: dict[str, Any] = {}
    for link, (bandwidth, latency) in LINKS.items():
        network = planning.Network(bandwidth, latency)
        for model, (size, products, batch) in MODELS.items():
            compute = 6 * products * batch / SPEED  # Two operations each, three passes.
            like = {"x": jax.ShapeDtypeStruct((int(size) // 1000, 1000), jnp.float32)}
            rows = []
            for workers in WORKERS:
                planned = jaxcomp.plan(
                    like,
                    workers,
                    network,
                    codecs={"ternary": codec, "sums": jaxcomp.Psum(codec)},
                    compute=compute,
                    link_only=True,
                )
                steps = {each.way.name: each.step for each in planned.forecasts}
                best = min(step for name, step in steps.items() if "dense" not in name)
                rows.append(round(steps["dense float32"] / best, 3))
            found[f"{model}, {link}"] = {"compute_s": compute, "speedup": rows}
    return {"numbers": {"workers": WORKERS, "models": found}}


def _scale_judged(numbers: dict[str, Any]) -> Judged:
    models, at = numbers["models"], list(numbers["workers"]).index(8)
    slow = {model: models[f"{model}, 1 Gbit/s"]["speedup"] for model in MODELS}
    heavy = all(slow[model][at] > slow["GoogLeNet"][at] for model in ("AlexNet", "VGG-A"))
    close = slow["AlexNet"][at] >= 3.04
    words = "; ".join(
        f"{name}: {row['speedup'][at]:.2f} on 8 workers, {row['speedup'][-1]:.2f} on 512"
        for name, row in models.items()
    )
    more = min(slow["AlexNet"][at], slow["VGG-A"][at]) / slow["GoogLeNet"][at]
    return Judged(words, decide(heavy and close, heavy), least(slow["AlexNet"][at] / 3.04, more))


_SETTING = (
    "A CNN on 5,000 images of MNIST (21,546 parameters, 500 steps), four workers, SGD with "
    "momentum, the best of five rates each, twenty seeds; every leaf ternary."
)

CLAIMS = (
    Claim(
        name="terngrad-training",
        methods=("terngrad",),
        source=f"{_WEN}, Tables 2 and 3",
        claim="With gradients clipped at 2.5 standard deviations ternary training is as accurate "
        "as 32-bit training (AlexNet, batch 256: 57.61 against 57.33 %); without clipping it "
        "loses about 3 % (54.63 %).",
        setting=_SETTING,
        judge=_clip_judged,
        criterion="last layer dense: clipped as good as dense, and better than not clipped",
        why="false",
        fixed="dd839675",
        changed=(
            Change(
                "9179b20c",
                PART,
                "The last layer was ternary too, which the paper leaves in 32 bits.",
            ),
        ),
        run=_train,
        minutes=9,
        note="The rows with a shared scaler compare the authors' code, which clips at the shared "
        "value, with the paper.",
    ),
    Claim(
        name="terngrad-layers",
        methods=("terngrad",),
        source=f"{_WEN}, section on layer-wise ternarising",
        claim="A scaler for each layer has a smaller variance, and trains better, than one for the "
        "whole gradient.",
        setting=_SETTING,
        judge=lambda found: _layers_judged(found["numbers"]),
        criterion="better with a scaler for each layer than with one, with clipping and without",
        fixed="88e61ce7",
        results="reproductions/terngrad-training.json",
        command="make reproduce CLAIM=terngrad-training",
    ),
    Claim(
        name="terngrad-scaling",
        methods=("terngrad", "averaged_ternary"),
        source=f"{_WEN}, the figure of throughputs from the performance model",
        claim="Ternary gradients speed up training on slow networks, more for AlexNet and VGG-A "
        "than for GoogLeNet; AlexNet on 8 workers with 1 Gbit/s: 3.04 times.",
        setting="Our link model over 2 to 512 workers, links alone and no overlap, with a training "
        "speed of 3·10¹² operations a second a worker (our assumption).",
        judge=_scale_judged,
        criterion="8 workers, 1 Gbit/s: AlexNet at least 3.04 times faster; AlexNet and "
        "VGG-A gain more than GoogLeNet",
        run=_scale,
        minutes=0.5,
        note="A model, not a measurement: the paper's constants are not known to us, and its "
        "servers hold parameters, while ours are collectives.",
    ),
)
