"""Which models, distributions and batches can be trained compressed."""

import collections
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomp.adapters.keras.framework import keras

_OWN = ("train_step", "compute_loss", "compute_metrics", "compute_loss_and_updates")


def check_model(model: Any) -> None:
    """Raises a `ValueError` for a model that cannot be trained compressed."""
    if keras.backend.backend() != "jax":
        raise ValueError(
            "`model` must be a model of Keras' JAX backend, got one of the backend "
            f"{keras.backend.backend()!r}: set KERAS_BACKEND=jax before Keras is imported"
        )
    if not isinstance(model, keras.Model):
        raise ValueError(f"`model` must be a keras.Model, got {model!r}")
    for name in _OWN:
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ValueError(
                f"`model` must have Keras' own {name}, got that of {type(model).__name__}: put "
                "jaxcomp.compressed_value_and_grad in the place of jax.value_and_grad in its "
                "train_step"
            )
    if not model.built or not model.trainable_variables:
        raise ValueError(
            "`model` must be built and have trainable variables, got a model without them: call "
            "it on a batch, or begin it with keras.Input"
        )


def data_axis(mesh: Mesh | None, axis_name: str | None) -> tuple[Mesh, str]:
    """The mesh, and the axis that batches are split over."""
    distribution = keras.distribution.distribution()
    if mesh is None and distribution is None:
        raise ValueError(
            "`mesh` and `axis_name` must be given where Keras has no distribution, got None: call "
            "keras.distribution.set_distribution(keras.distribution.DataParallel()) before the "
            "model is made"
        )
    if mesh is None:
        axis_name = axis_name or distribution.batch_dim_name
    found: Mesh = distribution.device_mesh.backend_mesh if mesh is None else mesh
    if axis_name is None or axis_name not in found.axis_names:
        raise ValueError(
            f"`axis_name` must be an axis of the mesh, {found.axis_names}, got {axis_name!r}: name "
            "the axis that batches are split over, or make the distribution with "
            "keras.distribution.DataParallel, or ModelParallel(batch_dim_name=...)"
        )
    return found, axis_name


def paths_of(variables: list) -> tuple[str, ...]:
    """The path of each variable, numbered where several are equal."""
    counts: collections.Counter[str] = collections.Counter()
    found = []
    for variable in variables:
        counts[variable.path] += 1
        number = counts[variable.path]
        found.append(variable.path if number == 1 else f"{variable.path}_{number}")
    return tuple(found)


def specs_of(variables: list, mesh: Mesh, axis_name: str) -> Any:
    """How the variables are sharded over the other axes; None if there are none."""
    found = collections.OrderedDict()
    for path, variable in zip(paths_of(variables), variables, strict=True):
        home = variable.value.sharding
        spec = home.spec if isinstance(home, NamedSharding) else PartitionSpec()
        if axis_name in jax.tree.leaves(tuple(spec)):
            raise ValueError(
                "`model` must have variables that are replicated over the data axis "
                f"{axis_name!r}, got {path!r} with {spec}: shard it over another axis of the mesh"
            )
        found[path] = spec
    return found if len(mesh.axis_names) > 1 else None


def check_arrays(
    x: Any, batch_size: int | None, validation_split: float, mesh: Mesh, axis_name: str
) -> None:
    """Raises a `ValueError` for arrays whose batches, or the last of them, do not divide."""
    count, size = math.floor(x.shape[0] * (1 - validation_split)), batch_size or 32
    for rows in {min(size, count), count % size or size}:
        check_rows(rows, f"batches of {size} of {count} examples", mesh, axis_name)


def check_batch(batch: Any, mesh: Mesh, axis_name: str) -> None:
    """Raises a `ValueError` for a batch that the devices do not divide."""
    for x in jax.tree.leaves(batch):
        if jnp.ndim(x):
            check_rows(x.shape[0], f"a batch of {x.shape[0]}", mesh, axis_name)


def check_rows(rows: int, said: str, mesh: Mesh, axis_name: str) -> None:
    """Raises a `ValueError` for a number of examples that the devices do not divide."""
    workers = mesh.shape[axis_name]
    if rows % workers:
        raise ValueError(
            "`batch_size`, and the examples of the last batch, must be multiples of the "
            f"{workers} devices of the axis {axis_name!r}, got {said}: leave out {rows % workers} "
            "examples, or choose another batch_size"
        )
