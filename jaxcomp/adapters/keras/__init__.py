"""Keras 3 on JAX: models whose gradients are averaged compressed between the devices.

Needs Keras: `pip install keras`, and `KERAS_BACKEND=jax`. Import this module before
`keras.saving.load_model` reads a model of it.
"""

from jaxcomp.adapters.keras.model import CompressedModel, compress

__all__ = ["CompressedModel", "compress"]
