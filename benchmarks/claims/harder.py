"""Quantizers in a deeper network, and with delayed gradients.

The driver is in `networks.py`.
"""

import functools
from typing import Any, NamedTuple

import images
import jax
import jax.numpy as jnp
import optax

import jaxcomp
from claims import networks, scores
from claims.claim import HOLDS, Change, Claim, Judged, decide
from claims.descent import least, within
from claims.networks import AXIS, Method, Plan, Rate, Task, everywhere, mean
from jaxcomp.mesh import kinds

DEEP = Plan(500, (0.02, 0.05, 0.1, 0.2, 0.4))
STEM = {"conv0": (9, 16), "conv1": (144, 32)}
BLOCKS, WIDTH = 3, 32
CLIP, LOSS = 2.5, 2.0
HEAD = "head"


def _shapes() -> dict[str, tuple[int, ...]]:
    """Two convolutions that halve the image, three residual blocks of two, and a linear layer."""
    inner = {f"block{i}_{j}": (9 * WIDTH, WIDTH) for i in range(BLOCKS) for j in range(2)}
    kernels = {**STEM, **inner, HEAD: (WIDTH, 10)}
    return kernels | {f"{name}_bias": shape[1:] for name, shape in kernels.items()}


def _init(key: Any) -> dict[str, Any]:
    """The last convolution of a block begins smaller, as nothing is normalised."""
    params = networks.normal(key, _shapes())
    return {name: leaf * (0.3 if name.endswith("_1") else 1) for name, leaf in params.items()}


def _logits(params: Any, pixels: Any) -> Any:
    def layer(name: str, x: Any, stride: int = 1) -> Any:
        return networks.patches(x, stride) @ params[name] + params[f"{name}_bias"]

    x = pixels.reshape(-1, images.SIDE, images.SIDE, 1)
    for name in STEM:
        x = jax.nn.relu(layer(name, x, 2))
    for i in range(BLOCKS):
        inside = jax.nn.relu(layer(f"block{i}_0", x))
        x = jax.nn.relu(x + layer(f"block{i}_1", inside))
    return x.mean((1, 2)) @ params[HEAD] + params[f"{HEAD}_bias"]


@functools.cache
def deep() -> Task:
    """A residual network of nine layers and 60,618 parameters, on the images of `cnn`."""
    return networks.cnn()._replace(name="deep CNN", init=_init, logits=_logits)


def _ternary(rate: Rate, key: Any) -> Any:
    """All leaves but those of the last layer, as the paper has it."""
    codec = jaxcomp.terngrad(clip=None, shared=True)
    policy = jaxcomp.Policy(codec, (jaxcomp.Rule(f"{HEAD}*", None),), min_size=0, min_ndim=0)

    def clip(grads: Any) -> Any:
        inside = {name: CLIP * leaf.std() for name, leaf in grads.items()}
        return {
            name: leaf if name.startswith(HEAD) else jnp.clip(leaf, -inside[name], inside[name])
            for name, leaf in grads.items()
        }

    return optax.chain(
        optax.stateless(lambda grads, params: clip(grads)),
        jaxcomp.compressed_mean(policy, AXIS, key=key),
        networks.momentum(rate),
    )


def _deep() -> dict[str, Any]:
    methods: dict[str, Method] = {"float32": mean(jaxcomp.Dense()), "TernGrad": _ternary}
    return {"numbers": networks.compare(methods, deep(), DEEP)}


def _deep_judged(numbers: dict[str, Any]) -> Judged:
    found = scores.paired(numbers, "TernGrad", "float32")
    told = ", ".join(scores.told(numbers, name) for name in numbers["methods"])
    words = f"TernGrad {scores.words(found)} points beside float32; {told}"
    verdict = decide(found.low > -LOSS, part=found.mean > -LOSS)
    return Judged(words, verdict, least(within(LOSS, -found.low)))


MOST = 8
SLOW = Plan(500, (0.05, 0.1, 0.2, 0.4, 0.8))
SLOW_GRU = Plan(200, (0.5, 1.0, 2.0, 4.0, 8.0), size=4)
DELAYS = {networks.cnn: SLOW, networks.gru: SLOW_GRU}


@kinds.DISPLACED.register
class DelayedState(NamedTuple):
    """The state of `delayed`.

    Attributes:
        inner: of the method.
        past: the parameters of the last steps, the newest first.
        offset: the parameters at which this worker takes its next gradient, minus the newest.
        key: of the delays.
        step: the number of steps.
    """

    inner: Any
    past: Any
    offset: Any
    key: Any
    step: Any


def delayed(method: Method, most: int) -> Method:
    """Workers take gradients at parameters of 0 to `most` steps ago, drawn anew at each step."""

    def make(rate: Rate, key: Any) -> Any:
        inner = optax.with_extra_args_support(method(rate, key))
        drawn = jax.random.fold_in(key, 3)

        def init(params: Any) -> DelayedState:
            past = jax.tree.map(lambda p: jnp.stack([p] * (most + 1)), params)
            zero = jax.tree.map(jnp.zeros_like, params)
            return DelayedState(inner.init(params), past, zero, drawn, jnp.zeros((), jnp.int32))

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            updates, after = inner.update(updates, state.inner, params)
            newest = optax.apply_updates(params, updates)
            past = jax.tree.map(
                lambda rows, p: jnp.roll(rows, 1, axis=0).at[0].set(p), state.past, newest
            )
            own = jax.random.fold_in(state.key, jax.lax.axis_index(AXIS))
            age = jax.random.randint(jax.random.fold_in(own, state.step), (), 0, most + 1)
            offset = jax.tree.map(lambda rows, p: rows[age] - p, past, newest)
            return updates, DelayedState(after, past, offset, state.key, state.step + 1)

        return optax.GradientTransformation(init, update)

    return make


def _asynchrony() -> dict[str, Any]:
    dense = mean(jaxcomp.Dense(), optax.sgd)
    coded = mean(everywhere(jaxcomp.qsgd(bits=4)), optax.sgd)
    methods = {
        "dense, delays": delayed(dense, MOST),
        "4 bits, delays": delayed(coded, MOST),
        "dense": dense,
        "4 bits": coded,
    }
    found = {}
    for make, plan in DELAYS.items():
        task = make()
        found[task.name] = networks.compare(methods, task, plan)
    return {"numbers": found}


def _asynchrony_judged(numbers: dict[str, Any]) -> Judged:
    names = "4 bits, delays", "dense, delays"
    kept = [scores.equal(found, *names) for found in numbers.values()]
    words = "; ".join(
        f"{task}: 4 bits {scores.words(scores.paired(found, *names))} {found['unit']} better than "
        "dense with the same delays, "
        + ", ".join(scores.told(found, name) for name in found["methods"])
        for task, found in numbers.items()
    )
    margin = least(*(scores.as_good(found, *names) for found in numbers.values()))
    return Judged(words, decide(all(kept), part=any(kept)), margin)


CLAIMS = (
    Claim(
        name="terngrad-deep",
        methods=("terngrad", "TernGrad"),
        source="Wen et al., TernGrad, 2017, abstract and the table of GoogLeNet",
        claim="On a deeper network (GoogLeNet) ternary gradients lose less than 2 % of the "
        "accuracy on average.",
        setting="A residual network of nine layers on 5,000 images of MNIST (60,618 parameters, "
        f"{DEEP.steps} steps), four workers, SGD with momentum, the best of five rates each, "
        "twenty seeds; a scaler for each layer that workers share, clipping at 2.5 standard "
        "deviations, the last layer in float32.",
        judge=_deep_judged,
        criterion="paired loss of accuracy against float32 below 2 points, by its 95 % interval",
        fixed="4636ab1d",
        changed=(Change("4636ab1d", HOLDS, "A name in the program; no setting."),),
        run=_deep,
        minutes=6,
        note="Two points of MNIST's accuracy are much: the interval tells whether the loss is "
        "smaller. The paper's losses on GoogLeNet are of top-5 accuracy on ImageNet. In a first "
        "run by the same criterion, with a grid from 0.005 to 0.1, the same rates were best, "
        "float32's at the edge. One seed of float32 ends at 84.2 %, which helps TernGrad: without "
        "it the loss is one point.",
    ),
    Claim(
        name="qsgd-asynchrony",
        methods=("qsgd", "QSGD"),
        source="Alistarh, Grubic, Li, Tomioka and Vojnovic, QSGD, 2017, theorem on asynchronous "
        "descent",
        claim="QSGD converges for non-convex losses with asynchronous workers too, whose gradients "
        "have bounded delays.",
        setting="A CNN on MNIST (21,546 parameters, 500 steps) and a GRU on bytes (47,472, 200 "
        "steps), four workers, SGD without momentum, the best of five rates each, twenty seeds; "
        f"each worker takes each gradient at parameters of 0 to {MOST} steps ago, drawn evenly.",
        judge=_asynchrony_judged,
        criterion="with delays of up to 8 steps, on both networks 4 bits as good as dense",
        why="size",
        fixed="44d7364d",
        run=_asynchrony,
        minutes=6,
        note="Delays are simulated in a program whose workers take steps together. Buckets have "
        "512 elements, with Euclidean norms. Delays cost both codes more than four bits do.",
    ),
)
