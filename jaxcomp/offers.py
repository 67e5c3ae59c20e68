"""What a codec may offer beyond its protocol, and what stands in for it where it does not."""

from typing import Any

from jaxcomp.protocols import Array, AxisName, Codec, Key


def contractive(codec: Codec) -> bool:
    """Whether a codec is biased with an error smaller than its input, so that feedback mends it."""
    return getattr(codec, "contractive", not codec.unbiased)


def bits_per_element(codec: Codec) -> float | None:
    """What a full bucket costs an element, if the codec claims it."""
    return getattr(codec, "bits_per_element", None)


def agree(codec: Codec, key: Key, x: Array, count: Array, state: Any, axis_name: AxisName) -> Any:
    """What the workers must agree on before they encode: the state itself for most codecs."""
    hook = getattr(codec, "agree", None)
    return state if hook is None else hook(key, x, count, state, axis_name)


def side(codec: Codec, agreed: Any) -> Any:
    """What decoders know of what was agreed on, beside the payload: nothing for most codecs."""
    hook = getattr(codec, "side", None)
    return None if hook is None else hook(agreed)


def variance_bound(codec: Codec, size: int) -> float | None:
    """The smallest known relative variance of buckets of this size, None where none is known."""
    hook = getattr(codec, "variance_bound", None)
    return None if hook is None else hook(size)
