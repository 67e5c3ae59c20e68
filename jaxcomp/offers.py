"""What a codec may offer beyond its protocol, and what stands in for it where it does not."""

from typing import Any

from jaxcomp.protocols import Array, ArrayLike, AxisName, Codec, Key


def contractive(codec: Codec) -> bool:
    """Whether a codec is biased with an error smaller than its input, so that feedback mends it."""
    return getattr(codec, "contractive", not codec.unbiased)


def bits_per_element(codec: Codec) -> float | None:
    """What a full bucket costs an element, if the codec claims it."""
    return getattr(codec, "bits_per_element", None)


def reorders(codec: Codec) -> bool:
    """Whether its `decode_sum` equals the sum of `decode` only up to rounding."""
    return getattr(codec, "reorders", False)


def homogeneous(codec: Codec) -> bool:
    """Whether an input twice as large decodes to an output twice as large."""
    return getattr(codec, "homogeneous", True)


def mixed(codec: Codec) -> int | float:
    """Elements that must be rotated together at random for what the codec sends of some of them to
    stand for all: 0 for most codecs.
    """
    return getattr(codec, "mixed", 0)


def agrees(codec: Codec) -> bool:
    """Whether workers agree on something before they encode."""
    return getattr(codec, "agrees", hasattr(codec, "agree"))


def agree(codec: Codec, key: Key, x: Array, count: Array, state: Any, axis_name: AxisName) -> Any:
    """What the workers must agree on before they encode: the state itself for most codecs."""
    hook = getattr(codec, "agree", None)
    return hook(key, x, count, state, axis_name) if hook and agrees(codec) else state


def side(codec: Codec, agreed: Any) -> Any:
    """What decoders know of what was agreed on, beside the payload: nothing for most codecs."""
    hook = getattr(codec, "side", None)
    return None if hook is None else hook(agreed)


def sided(codec: Codec) -> bool:
    """Whether its decoders need what the workers agreed on."""
    return getattr(codec, "sided", hasattr(codec, "side"))


def names_senders(codec: Codec) -> bool:
    """Whether its payloads say which elements were sent, so that a mean may be over the senders."""
    return getattr(codec, "names_senders", hasattr(codec, "mean_of_senders"))


def mean_of_senders(
    codec: Any, keys: Key, payloads: Any, like: ArrayLike, weights: Array | None = None
) -> Array:
    """The mean of each element over those who sent it, of a codec that names them."""
    return codec.mean_of_senders(keys, payloads, like, weights)


def summable(codec: Codec, workers: int) -> Codec:
    """The codec whose payloads so many workers may add up: itself, if it is linear.

    Raises:
        ValueError: if there is none.
    """
    if codec.linear:
        return codec
    hook = getattr(codec, "summable", None)
    if hook is None:
        raise not_summable(codec, "its payloads do not add up to one")
    return hook(workers)


def not_summable(codec: Codec, why: str) -> ValueError:
    """What to raise for a codec whose payloads cannot be added, for this reason."""
    return ValueError(
        f"`codec` must have payloads that can be added on the way, and not be {codec!r}: {why}. "
        "Take jaxcomp.Gather or jaxcomp.TwoShot, or a codec such as jaxcomp.random_k(), "
        "jaxcomp.int_sgd(), jaxcomp.thc() or jaxcomp.terngrad(shared=True)"
    )


def for_leaf(codec: Codec, shape: tuple[int, ...], dtype: Any) -> tuple[Codec | None, str | None]:
    """The codec for a leaf of this shape, or None and why not: itself for most codecs."""
    hook = getattr(codec, "for_leaf", None)
    return (codec, None) if hook is None else hook(shape, dtype)


def check_inner(name: str, codec: Any, *, agreement: bool = True, sums: bool = False) -> None:
    """Raises a `ValueError` unless this is a codec that another may be made of.

    Args:
        name: of the argument.
        codec: the codec.
        agreement: whether it may ask the workers to agree on something first.
        sums: whether decoders may need it, of payloads that are added.
    """
    if isinstance(codec, type) or not isinstance(codec, Codec):
        raise ValueError(
            f"`{name}` must be a codec such as jaxcomp.qsgd_inf(bits=4), got {codec!r}"
        )
    if sided(codec) and not (sums and codec.linear):
        raise ValueError(
            f"`{name}` must have decoders that need the payload alone, and those of {codec!r} need "
            "levels that the workers agree on; take fixed ones, such as jaxcomp.nuqsgd()"
        )
    if agrees(codec) and not agreement:
        raise ValueError(
            f"`{name}` must not ask the workers to agree on what it will be given only later, got "
            f"{codec!r}; take shared=False"
        )


def check_mixed(codec: Codec, block: int) -> None:
    """Raises a `ValueError` for a codec that needs more elements mixed than a rotation mixes."""
    if mixed(codec) > block:
        raise ValueError(
            "`codec` must not let one fitted step, or one part, stand for more elements than are "
            f"rotated together, block={block}: blocks that are small beside others would come back "
            f"too large, or never. Got {codec!r}; set block={block} in its parts, or a bucket size "
            "of at most that"
        )


def check_residual(feedback: Any, codec: Codec, size: int | None, decay: float = 1.0) -> None:
    """Raises a `ValueError` for a codec whose errors would add up faster than they are sent."""
    omega = None if size is None or contractive(codec) else variance_bound(codec, size)
    if omega is not None and decay**2 * omega >= 1:
        raise ValueError(
            f"`feedback` must be NoFeedback() or a Shift around {codec!r}, whose variance on "
            f"buckets of {size}, ω = {omega:.4g}, may exceed its input, so that what it loses "
            f"grows from step to step, got {feedback!r}; or take jaxcomp.Contractive(codec), more "
            "bits, shorter buckets, or a contractive codec such as jaxcomp.blockwise(bits=4)"
        )


def variance_bound(codec: Codec, size: int) -> float | None:
    """The smallest known relative variance of buckets of this size, None where none is known."""
    hook = getattr(codec, "variance_bound", None)
    return None if hook is None else hook(size)


def peaked_bound(codec: Codec, size: int, peak: float) -> float | None:
    """As `variance_bound`, of buckets whose largest element has this share of their energy."""
    hook = getattr(codec, "peaked_bound", None)
    return None if hook is None else hook(size, peak)
