"""Dense: after flax, docs_nnx/mnist_tutorial.md, with batch norm and dropout."""

from functools import partial

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

jax.config.update("jax_num_cpu_devices", 8)
train_steps, batch_size, learning_rate, momentum = 200, 256, 0.002, 0.9
images, labels = load_digits(return_X_y=True)
images, labels = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16, labels.astype(np.int32)
train, test = ({"image": images[i], "label": labels[i]} for i in (np.s_[:1280], np.s_[1280:]))


class CNN(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.3, rngs=rngs)
        self.avg_pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(128, 64, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=0.3, rngs=rngs)
        self.linear2 = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = self.avg_pool(nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x)))))
        x = nnx.relu(self.dropout2(self.linear1(x.reshape(x.shape[0], -1))))
        return self.linear2(x)


model = CNN(rngs=nnx.Rngs(0))
tx = optax.adamw(learning_rate, momentum)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))


def loss_fn(model, batch):
    logits = model(batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, logits


@nnx.jit
def train_step(model, optimizer, metrics, batch):
    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


@nnx.jit
def eval_step(model, metrics, batch):
    loss, logits = loss_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])


rng = np.random.default_rng(0)
for step in range(train_steps):
    if step == train_steps // 2:
        metrics.reset()
    chosen = rng.choice(1280, batch_size, replace=False)
    train_step(model, optimizer, metrics, {name: x[chosen] for name, x in train.items()})
final_loss = metrics.compute()["loss"]
model.eval()
metrics.reset()
eval_step(model, metrics, test)
accuracy = metrics.compute()["accuracy"]
print(f"loss {final_loss:.4f}, test accuracy {accuracy:.3f}")
