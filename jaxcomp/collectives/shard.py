"""A leaf of which each device has a part, and how it is made whole where it is used."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex_core

from jaxcomp.backend import axes
from jaxcomp.collectives import arguments
from jaxcomp.collectives.crossings import Home, Links, crossings
from jaxcomp.collectives.shards import AllGather
from jaxcomp.collectives.sums import Pvary
from jaxcomp.collectives.transfer import Transfer, transfer
from jaxcomp.layout.policy import Policy
from jaxcomp.misuse import sharded_loss
from jaxcomp.numerics import noise
from jaxcomp.types import Array, PyTree


@jax.tree_util.register_pytree_with_keys_class
class Shard:
    """This device's part of a leaf; `jaxcomp.gathered` makes it whole.

    A loop such as `jax.lax.scan` slices it layer by layer, as it slices an array.

    Args:
        array: the part.
        key: the raw key of its messages, or one for each layer.
        home: where the leaf, or each layer of it, lies.
        links: the codecs.
    """

    def __init__(self, array: Any, key: Any, home: Home, links: Links):
        self.array = array
        self.key = key
        self.home = home
        self.links = links

    def tree_flatten_with_keys(self):
        children = (
            (jax.tree_util.GetAttrKey("array"), self.array),
            (jax.tree_util.GetAttrKey("key"), self.key),
        )
        return children, (self.home, self.links)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, *static)

    def __jax_array__(self) -> Array:
        raise ValueError(self._part())

    def __getattr__(self, name: str) -> Any:
        # Never of a half-made node, such as `copy.copy` makes.
        raise AttributeError(self._part() if "home" in vars(self) else name)

    def _part(self) -> str:
        return (
            f"`{self.home.path}` must be made whole where the loss uses it, got this device's part "
            "of it: use jaxcomp.gathered(layer), inside the function of one layer"
        )

    def _refuse(self, *_: Any) -> Any:
        raise ValueError(self._part())

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __rmatmul__ = __truediv__ = __rtruediv__ = __pow__ = __neg__ = __getitem__ = _refuse

    def __repr__(self) -> str:
        return f"Shard({self.home.path!r}, {self.array!r})"


def gathered(tree: PyTree) -> PyTree:
    """The whole leaves of a layer, inside the loss of `jaxcomp.fully_sharded`.

    All parts in the tree travel as one message over each axis, the slowest first. In the backward
    pass their gradients are added up and scattered, the fastest axis first.

    Args:
        tree: a layer's parameters. What `fully_sharded` gave as a part is made whole, all other
            leaves are returned as they are.

    Raises:
        ValueError: for leaves that are still stacked: call it inside the loop over layers; for
            parts that were cast.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcomp
        >>> def loss(params, x):
        ...     @jax.checkpoint
        ...     def layer(x, own):
        ...         return jnp.tanh(x @ gathered(own)["w"]), None
        ...     return (jax.lax.scan(layer, x, params["blocks"])[0] ** 2).mean()

    Note:
        Make a layer whole once in a step: a second call sends it again, with the same noise. A loss
        that computes with parts, such as a norm over all parameters, is refused: add up what whole
        layers contribute, or take optax.add_decayed_weights for a penalty of the weights.

        Inside `jax.checkpoint`, as here, the backward pass gathers the layer again, and one layer
        is whole at a time; with `policy=jaxcomp.second_copy` over the fastest axis alone. On GPUs
        and TPUs the next layer arrives beside the computation of this one.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_shard)
    groups: dict[Links, list[int]] = {}
    for number, leaf in enumerate(leaves):
        if _is_shard(leaf):
            groups.setdefault(leaf.links, []).append(number)
    for links, numbers in groups.items():
        own = {leaves[number].home.path: leaves[number] for number in numbers}
        if len(own) < len(numbers):
            raise ValueError(
                "`tree` must have each part once, got one layer or leaf several times in a call"
            )
        for path, one in own.items():
            if one.key.dtype != jnp.uint32:
                raise ValueError(
                    f"`tree` must hold parts as the loss got them, got '{path}' cast to "
                    f"{one.key.dtype}: cast the result of jaxcomp.gathered, or give "
                    "jaxcomp.fully_sharded a `dtype`"
                )
            if one.array.ndim != len(one.home.spec):
                raise ValueError(
                    f"`tree` must be one layer, got all layers of '{path}': call "
                    "jaxcomp.gathered inside the loop over layers, such as jax.lax.scan"
                )
        # Of the paths, so that calls that share a leaf do not draw the same noise for others.
        key = arguments.key_of_site(own[min(own)].key, " ".join(sorted(own)))
        whole = together(
            {path: one.array for path, one in own.items()},
            {path: one.home for path, one in own.items()},
            links,
            key,
        )
        for number in numbers:
            leaves[number] = whole[leaves[number].home.path]
    return jax.tree.unflatten(treedef, leaves)


def second_copy(primitive: Any, *given: Any, **extra: Any) -> bool:
    """A policy of `jax.checkpoint` by which the backward pass gathers weights over one axis alone.

    Of weights that are split over several axes, the forward pass gathers the slowest first. With
    this policy each device keeps what it has before the last one: of `n` devices on the fastest
    axis each keeps `1 / n` of the layer's weights, in their own dtype. The backward pass gathers
    these, with the same bits as without the policy, and sends nothing over slower axes for it.

    Args:
        primitive: an operation of the layer, given by `jax.checkpoint`.
        *given: the types of its inputs.
        **extra: its parameters.

    Returns:
        Whether its results are kept.

    Raises:
        ValueError: where it is called like a function of a layer, or with another type.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcomp
        >>> def loss(params, x):
        ...     def layer(x, own):
        ...         return jnp.tanh(x @ jaxcomp.gathered(own)["w"]), None
        ...     layer = jax.checkpoint(layer, policy=jaxcomp.second_copy)
        ...     return (jax.lax.scan(layer, x, params["blocks"])[0] ** 2).mean()

    References:
        Wang et al., `ZeRO++ <https://arxiv.org/abs/2306.10209>`_, 2023: hpZ.

    Note:
        The paper's second copy is in 16 bits; here it has the dtype of the parameters. With a
        policy of yours, take `jax.checkpoint_policies.save_from_both_policies`. It changes nothing
        for weights that one axis alone splits.
    """
    if not isinstance(primitive, jex_core.Primitive):
        raise ValueError(
            f"`primitive` must be given by JAX, got {primitive!r}: write jax.checkpoint(layer, "
            "policy=jaxcomp.second_copy)"
        )
    return _keep(primitive, *given, **extra)


_SECOND_COPY = "jaxcomp.second_copy"
_keep = jax.checkpoint_policies.save_only_these_names(_SECOND_COPY)


def together(
    parts: Mapping[str, Array], homes: Mapping[str, Home], links: Links, key: Array
) -> dict[str, Array]:
    """The whole leaves of these parts.

    Args:
        parts: this device's part of each leaf, by its path.
        homes: where each leaf lies.
        links: the codecs.
        key: the key of the messages.
    """
    parts, key = sharded_loss.mark((dict(parts), key))
    sizes = {axis: axes.size(axis) for axis in links.axes}
    wholes = {path: homes[path].whole(x.shape, sizes) for path, x in parts.items()}
    crossed, narrow = crossings(homes, wholes, links), links.dtype
    first = crossed[0].weights
    found = {
        path: x.astype(narrow)
        if narrow and may_be_coded(x) and first.choose(path, wholes[path])[0] is None
        else x
        for path, x in parts.items()
    }
    for axis, weights, gradients, at, groups in crossed:
        slower = links.axes[: links.axes.index(axis)]
        for paths, split, frozen, apart in groups:
            own = {path: found[path] for path in paths}
            if frozen:
                site = (axis, "frozen", *apart)
                there = _on_axes(arguments.key_of_site(key, site), apart)
                got = _frozen_leaves(axis, weights, there, own, at) if split else {}
                found |= _named(got, apart)
                continue
            # Noise differs between all devices whose messages differ, and is the same where they
            # are the same: forward on all hosts that have the part already, and back on all that
            # have added up the gradient already.
            there = _on_axes(arguments.key_of_site(key, (axis, *apart)), apart)
            back = _on_axes(arguments.key_of_site(there, "back"), slower)
            if split:
                places = arguments.places(own, {path: at[path] for path in own})
                how: Transfer = AllGather(axis, weights, gradients, False, places, False)
                own = axes.vary(own, axis)
            else:
                how = Pvary(axis, gradients, gradients, True)
            got = transfer(how, there, own, back)
            found |= _named(got, apart) if split else got
    whole = {path: jnp.reshape(x, wholes[path]) for path, x in found.items()}
    return {p: x.astype(narrow) if narrow and may_be_coded(x) else x for p, x in whole.items()}


def _named(parts: dict[str, Array], apart: tuple[str, ...]) -> dict[str, Array]:
    """Parts with the name by which `second_copy` keeps them, if faster axes split them further."""
    return {p: checkpoint_name(x, _SECOND_COPY) for p, x in parts.items()} if apart else parts


def _frozen_leaves(
    axis: str, weights: Policy, key: Array, own: Mapping[str, Array], at: Mapping[str, int]
) -> dict[str, Array]:
    """Every worker's part of leaves without a gradient, stacked; none of it travels back."""
    own = lax.stop_gradient(axes.vary(dict(own), axis))
    coded = {path: x for path, x in own.items() if may_be_coded(x)}
    places = arguments.places(coded, {path: at[path] for path in coded})
    how = AllGather(axis, weights, weights, False, places, False)
    found = how.run(key, coded) if coded else {}
    for path in sorted(own.keys() - coded.keys()):
        x = axes.vary(lax.all_gather(_bits(own[path]), axis, axis=at[path]), axis)
        same = x.dtype == own[path].dtype
        found[path] = x if same else lax.bitcast_convert_type(x, own[path].dtype)
    return found


def _bits(x: Array) -> Array:
    """A leaf that the compiler does not widen before it is sent, as it does floats of 8 bits."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}"))


def may_be_coded(x: Any) -> bool:
    """Whether a leaf has a dtype that codecs take; all others are sent as they are."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize >= 2


def _is_shard(node: Any) -> bool:
    return isinstance(node, Shard)


def _on_axes(key: Array, names: tuple[str, ...]) -> Array:
    """The key with this device's numbers along other axes folded in."""
    return noise.fold(key, *(lax.axis_index(name) for name in names))
