"""`compress`: a Keras model around a model, with its own training step."""

import collections
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxcomp import expressions
from jaxcomp.adapters.keras import checks, losses
from jaxcomp.adapters.keras.framework import Model, keras, register
from jaxcomp.base import Gate
from jaxcomp.mesh import resizing, targets
from jaxcomp.transforms.compressed_value_and_grad import compressed_value_and_grad
from jaxcomp.types import PyTree

_SEEDS = "seed_generator_state"
"""The name of the variable of a `keras.random.SeedGenerator`: a raw key."""


def compress(
    model: Any,
    codec: Any,
    *,
    mesh: Mesh | None = None,
    axis_name: str | None = None,
    gate: Gate | None = None,
) -> "CompressedModel":
    """A Keras model that trains as the given one, with compressed messages between the devices.

    It shares the layers and variables of `model`, which is its attribute `model`. Each device of
    the data axis differentiates the loss of its own part of the batch, and the gradients are
    averaged as by `jaxcomp.compressed_mean`. Without rounding, `fit` is that of `model` to the
    order of sums, with sample weights, class weights and masks too; only layers that look at the
    whole batch differ: batch normalization uses the statistics of the device's own part, and its
    moving averages are means over the devices. Each device drops other units.

    Args:
        model: a built model, which may be compiled; its compilation is taken over. It must not
            have a training step, loss or metrics of its own class.
        codec: as for `jaxcomp.compressed_mean`; a policy sees the paths of Keras' variables, such
            as "dense/kernel". Memory lies in non-trainable variables.
        mesh: the mesh of the devices; None for that of the current `keras.distribution`.
        axis_name: the axis of the mesh that the batch is split over; None for that of the current
            `keras.distribution`, and the name is needed with `mesh`.
        gate: as for `jaxcomp.compressed_mean`.

    Raises:
        ImportError: without Keras.
        ValueError: for another backend, a model that is not built or has a training step of its
            own, variables that are sharded over the data axis, and if there is no data axis; on
            use, for a batch that the devices do not divide and a loss that is a sum.

    Example:
        Where Keras is installed::

            keras.distribution.set_distribution(keras.distribution.DataParallel())
            model = jaxcomp.adapters.keras.compress(make_model(), jaxcomp.qsgd_inf(bits=4))
            model.compile("adam", "sparse_categorical_crossentropy")
            model.fit(x, y, batch_size=64)
            model.save("model.keras")

    Note:
        `optimizer.gradient_accumulation_steps` of Keras exchanges in every step.
    """
    if keras is None:
        raise ImportError("jaxcomp.adapters.keras needs Keras 3: pip install keras")
    made = CompressedModel(model, codec, mesh=mesh, axis_name=axis_name, gate=gate)
    if model.compiled:
        made.compile_from_config(model.get_compile_config())
        for own, given in zip(made.optimizer.variables, model.optimizer.variables, strict=False):
            own.assign(given)
    return made


@register
class CompressedModel(Model):
    """A model around a model, as `compress` makes it and `keras.saving.load_model` reads it.

    Attributes:
        model: the model, with the same variables; save or export this one for programs without
            jaxcomp.
        codec: the codec.

    Note:
        Read where Keras has no distribution, it trains on one device. Memory of another number of
        devices is converted as by `jaxcomp.resize_workers`.
    """

    def __init__(
        self,
        model: Any,
        codec: Any,
        *,
        mesh: Mesh | None = None,
        axis_name: str | None = None,
        gate: Gate | None = None,
        name: str | None = None,
    ):
        checks.check_model(model)
        super().__init__(name=name or model.name, dtype=model.dtype_policy, autocast=False)
        self.model, self.codec, self.gate, self.built = model, codec, gate, True
        self._mesh, self._axis_name = checks.data_axis(mesh, axis_name)
        self._takes = set(inspect.signature(model.call).parameters) & {"training", "mask"}
        self._paths = checks.paths_of(model.trainable_variables)
        specs = checks.specs_of(model.trainable_variables, self._mesh, self._axis_name)
        self._steps = {weight: self._step(weight, specs) for weight in (None, "count")}
        memory = self._steps[None].init(self._params([v.value for v in model.trainable_variables]))
        leaves, self._memory_of = jax.tree.flatten(memory)
        self._memory = [
            keras.Variable(
                x, dtype=x.dtype.name, trainable=False, autocast=False, layout=x.sharding,
                name=f"memory_{number}",
            )
            for number, x in enumerate(leaves)
        ]  # fmt: skip

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """The outputs of the model."""
        given = {"training": training, "mask": mask}
        return self.model(inputs, **{name: given[name] for name in self._takes})

    def train_step(self, state: tuple, data: Any) -> tuple[dict[str, Any], tuple]:
        """One step, as Keras' own one, but for the gradients' mean."""
        trained, rest, optimizer, metrics = state
        batch = keras.utils.unpack_x_y_sample_weight(data)
        checks.check_batch(batch, self._mesh, self._axis_name)
        scale = losses.scale_of(self.optimizer, optimizer)
        masked = self._is_masked(trained, rest, batch[0])
        weighted = losses.is_weighted(self.loss, batch[2])
        step = self._steps["count" if masked or weighted else None]
        at = {id(v): number for number, v in enumerate(self.non_trainable_variables)}
        places = [at[id(v)] for v in self._memory]
        seeds = [n for n, v in enumerate(self.non_trainable_variables) if _is_seed(v)]
        keys = [jax.random.wrap_key_data(rest[n], impl="threefry2x32") for n in seeds]
        others = [None if n in places or n in seeds else x for n, x in enumerate(rest)]
        raw = [rest[n] for n in seeds]
        args = (self._params(trained), others, keys, raw, metrics, optimizer, scale, batch)
        memory = jax.tree.unflatten(self._memory_of, [rest[n] for n in places])
        (loss, aux), grads, memory = step(*args, memory=memory)
        grads = list(grads.values())
        if scale is not None:
            grads = [losses.rescaled(g, scale, aux["finite"]) for g in grads]
        trained_, optimizer = self.optimizer.stateless_apply(optimizer, grads, trained)
        rest_ = list(aux["rest"])
        for n, x in zip(places, jax.tree.leaves(memory), strict=True):
            rest_[n] = x
        for n, x in zip(seeds, aux["seeds"], strict=True):
            rest_[n] = jax.random.key_data(x)
        logs, metrics = self._logs(trained, rest, metrics, batch, loss, aux)
        return logs, (trained_, rest_, optimizer, metrics)

    def fit(self, x: Any = None, y: Any = None, batch_size: int | None = None, **extra: Any) -> Any:
        """As `keras.Model.fit`; with arrays, the last batch must be divisible too."""
        if hasattr(x, "shape") and extra.get("steps_per_epoch") is None:
            split = extra.get("validation_split") or 0
            checks.check_arrays(x, batch_size, split, self._mesh, self._axis_name)
        return super().fit(x, y, batch_size, **extra)

    def get_config(self) -> dict[str, Any]:
        """The model, and the codec as the line that builds it.

        Raises:
            ValueError: for a codec that is not made of jaxcomp's own parts.
        """
        texts = {name: repr(getattr(self, name)) for name in ("codec", "gate")}
        for name, text in texts.items():
            part = getattr(self, name)
            if part is not None and expressions.evaluate(text) != part:
                raise ValueError(
                    f"`{name}` must be made of public names of jaxcomp for `save`, got {text}: "
                    "use `save_weights`, or save the attribute `model`"
                )
        model = keras.saving.serialize_keras_object(self.model)
        gate = None if self.gate is None else texts["gate"]
        return {
            "name": self.name, "model": model, "codec": texts["codec"], "gate": gate,
            "axis_name": self._axis_name,
        }  # fmt: skip

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "CompressedModel":
        """A model of the current `keras.distribution`, or of one device if there is none."""
        model = keras.saving.deserialize_keras_object(config["model"], custom_objects)
        gate = config["gate"] and expressions.evaluate(config["gate"])
        mesh = axis_name = None
        if keras.distribution.distribution() is None:
            axis_name = config["axis_name"]
            mesh = jax.make_mesh((1,), (axis_name,), (AxisType.Auto,))
        codec = expressions.evaluate(config["codec"])
        return cls(model, codec, mesh=mesh, axis_name=axis_name, gate=gate, name=config["name"])

    def save_own_variables(self, store: Any) -> None:
        """Memory, and the number of devices that it is of."""
        store["workers"] = np.int32(self._mesh.shape[self._axis_name])
        for number, variable in enumerate(self._memory):
            store[str(number)] = np.asarray(variable.value)

    def load_own_variables(self, store: Any) -> None:
        """Memory, converted to the present number of devices."""
        saved = [jnp.asarray(store[str(n)]) for n in range(len(store.keys()) - 1)]
        params = self._params([v.value for v in self.model.trainable_variables])
        tx, mesh, axis_name = self._steps[None].tx, self._mesh, self._axis_name
        before = int(np.asarray(store["workers"]))
        target = targets.restore_target(tx, params, mesh, axis_name, workers=before)
        if jax.tree.map(jnp.shape, jax.tree.leaves(target)) != [x.shape for x in saved]:
            raise ValueError(
                f"the file must hold the memory of {self.codec!r}, got that of another codec, or "
                "none: load such weights into the attribute `model`"
            )
        memory = jax.tree.unflatten(jax.tree.structure(target), saved)
        memory = resizing.resize_workers(tx, memory, params, mesh.shape[axis_name])
        for variable, x in zip(self._memory, jax.tree.leaves(memory), strict=True):
            variable.assign(x)

    def _step(self, weight: str | None, specs: PyTree) -> Any:
        """The value and the gradients of a loss, which is a mean by `weight`."""
        return compressed_value_and_grad(
            self._loss, self._mesh, self._axis_name, self.codec, has_aux=True, weight=weight,
            param_specs=specs, gate=self.gate, value_and_grad=losses.unscaled,
        )  # fmt: skip

    def _loss(
        self, params: PyTree, others: list, keys: list, raw: list, metrics: list, optimizer: list,
        scale: Any, batch: tuple,
    ) -> tuple[Any, dict[str, Any]]:  # fmt: skip
        """The loss of one device's part of the batch, and what Keras' step returns beside it."""
        seeds, memory = iter(map(jax.random.key_data, keys)), iter(self._memory)
        rest = [
            x if x is not None
            else next(seeds) if _is_seed(v)
            else jnp.zeros(next(memory).shape, v.dtype)  # Of no effect: memory is not the model's.
            for x, v in zip(others, self.non_trainable_variables, strict=True)
        ]  # fmt: skip
        loss, (plain, y_pred, after, _) = self.compute_loss_and_updates(
            list(params.values()), rest, metrics, *batch, training=True,
            optimizer_variables=optimizer,
        )  # fmt: skip
        at = [n for n, v in enumerate(self.non_trainable_variables) if _is_seed(v)]
        # Each device draws from its own stream; the next state is that of the common one.
        drawn = [old + (after[n] - rest[n]) for n, old in zip(at, raw, strict=True)]
        masks = losses.masks_of(y_pred)
        aux = {
            "loss": plain,
            "y_pred": y_pred,
            "rest": [x if old is not None else None for x, old in zip(after, others, strict=True)],
            "seeds": [jax.random.wrap_key_data(x, impl="threefry2x32") for x in drawn],
            "scale": scale,
        }
        if any(mask is not None for mask in masks) or losses.is_weighted(self.loss, batch[2]):
            aux["count"] = losses.denominator(self.loss, masks, batch[2])
        return loss, aux

    def _logs(
        self, trained: list, rest: list, metrics: list, batch: tuple, loss: Any, aux: dict
    ) -> tuple[dict[str, Any], list]:
        """The metrics of the whole batch, from the predictions of all devices."""
        x, y, sample_weight = batch
        y_pred = aux["y_pred"]
        _, (_, _, metrics) = self.stateless_compute_loss(  # Losses of several outputs have metrics.
            trained, rest, metrics, x, y, y_pred, sample_weight, training=True
        )
        mapping = list(zip(self.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            rows = jax.tree.leaves(x)[0].shape[0]
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss, sample_weight=rows)
            logs = self.compute_metrics(x, y, y_pred, sample_weight)
        return logs, [scope.get_current_value(v) for v in self.metrics_variables]

    def _params(self, values: list) -> PyTree:
        if len(values) != len(self._paths):
            raise ValueError(
                f"`model` must have the {len(self._paths)} trainable variables that it had when it "
                f"was compressed, got {len(values)}: freeze layers before compress(model, codec)"
            )
        return collections.OrderedDict(zip(self._paths, values, strict=True))

    def _is_masked(self, trained: list, rest: list, x: Any) -> bool:
        """Whether the loss counts only some of the predictions."""
        found = []

        def forward(trained: list, rest: list, x: Any) -> None:
            y_pred = self.stateless_call(trained, rest, x, training=True)[0]
            found.extend(mask is not None for mask in losses.masks_of(y_pred))

        jax.eval_shape(forward, trained, rest, x)
        return any(found)


def _is_seed(variable: Any) -> bool:
    return variable.name == _SEEDS and variable.dtype == "uint32"
