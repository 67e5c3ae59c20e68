"""The model, the data and the method; server and clients import this file."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxcomp
from jaxcomp import federated

WIDTHS, TEST, STEPS, BATCH = (64, 256, 128, 10), 517, 16, 32


def params():
    """The parameters before the first round."""
    draw, found = np.random.default_rng(0), {}
    for layer, (rows, columns) in enumerate(itertools.pairwise(WIDTHS)):
        kernel = draw.standard_normal((rows, columns)) * np.sqrt(2 / rows)
        found[f"dense{layer}"] = {"kernel": jnp.float32(kernel), "bias": jnp.zeros(columns)}
    return found


def logits_of(params, images):
    for layer in range(len(WIDTHS) - 1):
        images = jax.nn.relu(images) if layer else images
        images = images @ params[f"dense{layer}"]["kernel"] + params[f"dense{layer}"]["bias"]
    return images


def loss_fn(params, batch):
    """The mean cross-entropy of a batch."""
    images, digits = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, images), digits)
    return losses.mean()


METHOD = federated.Method(
    work=federated.LocalSteps(loss_fn, optax.sgd(0.2)),  # What a client does in a round.
    up=jaxcomp.top_k(fraction=0.05),  # What it sends: the rest stays in its residual.
    down=jaxcomp.qsgd_inf(bits=8),  # What the server sends.
)


def data(part, parts):
    """Images and digits for training that belong to one of so many clients."""
    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))[TEST:][part::parts]
    return (images[order] / 16 - 0.3).astype(np.float32), digits[order].astype(np.int32)


def batches(part, parts, round):
    """The batches of a client in a round: arrays [steps, batch, ...]."""
    images, digits = data(part, parts)
    chosen = np.random.default_rng([part, round]).integers(len(images), size=(STEPS, BATCH))
    return images[chosen], digits[chosen]


def accuracy_of(params):
    """The percentage of test images that are classified correctly."""
    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))[:TEST]
    logits = logits_of(params, (images[order] / 16 - 0.3).astype(np.float32))
    return float(100 * jnp.mean(logits.argmax(-1) == digits[order]))
