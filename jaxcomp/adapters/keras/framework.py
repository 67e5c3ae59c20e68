"""The module of Keras, where it is installed."""

from typing import Any

try:
    import keras as _found
except ImportError:  # The modules of this package can be read; `compress` says what is missing.
    _found = None

keras: Any = _found
Model: Any = keras.Model if keras else object
Layer: Any = keras.layers.Layer if keras else object


def register(cls: type) -> type:
    """Makes a class known to `keras.saving.load_model`."""
    return keras.saving.register_keras_serializable("jaxcomp")(cls) if keras else cls
