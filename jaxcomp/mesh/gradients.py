"""Gradients of one worker: local parameters, and `value_and_grad` at them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp import checks
from jaxcomp.backend import axes
from jaxcomp.base import adapter
from jaxcomp.mesh import objects
from jaxcomp.types import AxisName, PyTree


def local(params: PyTree, axis_name: AxisName) -> PyTree:
    """The parameters, typed so that their gradient is this worker's own.

    Under `shard_map` with `check_vma=True`, JAX sums the gradient of a replicated parameter over
    the axis, so there is nothing left to compress. Differentiate the loss at the local parameters
    instead: `jax.grad(loss)(local(params, "data"), batch)`, or use
    `jaxcomp.value_and_grad(loss, "data")(params, batch)`, which also averages the loss. Under
    `pmap`, `vmap` and `check_vma=False` this function is the identity.

    The loss must be this worker's own. Average its value after `jax.value_and_grad`: if
    `jax.lax.pmean` averages the loss inside the function, JAX divides the gradients by the number
    of workers, and `compressed_mean` refuses them.

    Raises:
        ValueError: if the axis is not bound, or for an nnx object, because in-place changes of its
            copy would be lost.
    """
    axes.require(axis_name)
    kind = adapter.objects_of(params)
    if kind is not None:
        raise ValueError(
            f"`params` must be a tree of arrays, got an {kind.name} object: a call of its copy "
            "would change the random streams and batch statistics of the copy only. Use "
            f"jaxcomp.value_and_grad(loss_fn, {axis_name!r})(model, batch), which changes the "
            "model in place."
        )
    return objects.vary(params, axis_name)


def value_and_grad(
    loss_fn: Callable[..., Any],
    axis_name: AxisName,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    wrt: Any = None,
    fold_keys: bool = True,
    key_argnums: int | Sequence[int] = (),
    key_argnames: str | Sequence[str] = (),
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, but with this worker's own gradient and the averaged loss.

    `loss, grads = value_and_grad(loss_fn, "data")(params, batch)` returns the loss averaged over
    the workers, and the gradient of this worker's loss, as `compressed_mean` needs it. Call it
    inside a mapped function, such as a step of `data_parallel`. `loss_fn` must not average the loss
    itself.

    Random numbers differ between workers: PRNG keys that are the same on all workers are folded
    with the worker's index before `loss_fn` sees them. This applies to typed keys
    (`jax.random.key`) anywhere in arguments that are not differentiated, and to raw keys
    (`jax.random.PRNGKey`, `uint32[..., 2]` or, of rbg, `uint32[..., 4]`) in the arguments that
    `key_argnums` or `key_argnames` name. Without a name, a raw key is data and is not folded, so
    all workers draw the same noise. Keys that `loss_fn` closes over are not folded.

    For an argument that is an nnx object, the variables `wrt` are differentiated, and the gradient
    is an `nnx.State`, as from `nnx.value_and_grad`. All nnx objects among the arguments change in
    place: counts of random streams advance, and batch statistics (`nnx.BatchStat`) are averaged
    over the workers. Their keys (`nnx.RngKey`) are folded only for `loss_fn`.

    For any other argument, the floating arrays are differentiated. Integers, functions and other
    leaves of an equinox module are not, and have the gradient None, as from
    `eqx.filter_value_and_grad`.

    Args:
        loss_fn: returns this worker's loss, or with `has_aux` a pair of the loss and other data.
        axis_name: the mapped axis or axes that the workers are on.
        argnums: the numbers of the positional arguments to differentiate.
        has_aux: whether `loss_fn` returns a pair. Floating scalars in its second entry are metrics
            and are averaged over the workers; other arrays, such as logits, stay this worker's own.
        wrt: an nnx filter that selects the variables of an nnx object to differentiate; None for
            `nnx.Param`.
        fold_keys: whether keys are folded with the worker's index.
        key_argnums: the numbers of arguments that are raw keys or trees of them.
        key_argnames: the names of such arguments, if they are passed by keyword.

    Returns:
        A function of the same arguments that returns the loss, or with `has_aux` a pair of the loss
        and the auxiliary data, and then the gradients.

    Raises:
        ValueError: outside of a mapped function; if an argument that is named as a key is none;
            if the loss is already the same on all workers, which is detected only with
            `check_vma=True`; if `loss_fn` adds variables to an nnx object, or if another variable
            than a batch statistic differs between workers after it.

    Example:
        >>> import jaxcomp
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> def step(w, x):
        ...     loss, grad = value_and_grad(lambda w, x: (w * x).sum(), "data")(w, x)
        ...     return loss, jax.lax.pmean(grad, "data")
        >>> jaxcomp.data_parallel(step, mesh, "data")(jnp.float32(2), jnp.arange(4.0))
        (Array(12., dtype=float32), Array(6., dtype=float32))
    """
    own = own_value_and_grad(
        loss_fn, axis_name, argnums, has_aux, wrt, fold_keys, key_argnums, key_argnames
    )

    @functools.wraps(loss_fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        (loss, aux), grads = own(*args, **kwargs)
        loss = lax.pmean(loss, axis_name)
        aux = jax.tree.map(lambda x: _metric(x, axis_name), aux)
        return (loss, aux) if has_aux else loss, grads

    return run


def own_value_and_grad(
    loss_fn: Callable[..., Any],
    axis_name: AxisName,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    wrt: Any = None,
    fold_keys: bool = True,
    key_argnums: int | Sequence[int] = (),
    key_argnames: str | Sequence[str] = (),
) -> Callable[..., Any]:
    """`value_and_grad`, whose loss and data are this worker's own too; the data `()` without any.

    Keys that the loss returns as it got them are returned as they were given, not folded.
    """
    checks.function("loss_fn", loss_fn)

    def run(*args: Any, **kwargs: Any) -> Any:
        axes.require(axis_name)
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        if any(not -len(args) <= number < len(args) for number in numbers):
            raise ValueError(
                f"`argnums` must be numbers of the {len(args)} positional arguments, got {argnums}"
            )
        numbers = tuple(number % len(args) for number in numbers)
        slots: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        held, given = _Held(slots, numbers, wrt), slots
        plain = {n: objects.select(args[n], _floats(args[n])) for n in numbers if n not in held}
        at = {number: objects.vary(kept, axis_name) for number, (kept, _) in plain.items()}
        named = _named_keys(slots, len(args), (*numbers, *held.slots), key_argnums, key_argnames)
        if fold_keys:
            held.keys = fold_in_worker(held.keys, axis_name)
            slots = {
                slot: arg
                if slot in numbers or slot in held
                else fold_in_worker(arg, axis_name, raw=slot in named)
                for slot, arg in slots.items()
            }

        def own(at: dict, of_objects: PyTree) -> Any:
            whole = slots | {n: objects.combine(kept, plain[n][1]) for n, kept in at.items()}
            whole |= (inside := held.whole(of_objects))
            found = loss_fn(*(whole[n] for n in range(len(args))), **{k: whole[k] for k in kwargs})
            loss, aux = found if has_aux else (found, ())
            _check_own(loss, axis_name)
            return loss, (aux, held.after(inside))

        own_grad = jax.value_and_grad(own, argnums=(0, 1), has_aux=True)
        (loss, (aux, after)), found = own_grad(at, axes.vary(held.differentiated, axis_name))
        held.update(after, axis_name)
        grads = tuple(held.part(found[1], n) if n in held else found[0][n] for n in numbers)
        pairs = zip(*(jax.tree.leaves([*x.values()]) for x in (slots, given)), strict=True)
        before = {id(folded): key for folded, key in pairs if folded is not key}
        aux = jax.tree.map(lambda x: before.get(id(x), x), aux)
        return (loss, aux), grads[0] if isinstance(argnums, int) else grads

    return run


class _Held:
    """The objects among the arguments of a loss, split into structure and arrays.

    Attributes:
        differentiated: the arrays to differentiate, as one tree for each object.
        keys: the keys of random streams, too.
    """

    def __init__(self, args: dict, numbers: tuple[int, ...], wrt: Any):
        self._kind = kind = adapter.objects_of(tuple(args.values()))
        given = {} if kind is None else {s: arg for s, arg in args.items() if kind.found(arg)}
        self.slots, self._given = list(given), tuple(given.values())
        self._at, self._wrt = [self.slots.index(n) for n in numbers if n in given], wrt
        self._structure, self.differentiated, self.keys, self._rest = self._parts(self._given)

    def __contains__(self, slot: Any) -> bool:
        return slot in self.slots

    def _parts(self, held: tuple) -> tuple[Any, list[PyTree], list[PyTree], list[PyTree]]:
        if self._kind is None:
            return None, [], [], []
        return self._kind.part(held, self._at, self._wrt)

    def whole(self, differentiated: list[PyTree]) -> dict:
        """New objects by argument, for one evaluation of the loss."""
        if self._kind is None:
            return {}
        made = self._kind.merge(self._structure, differentiated, self.keys, self._rest)
        return dict(zip(self.slots, made, strict=True))

    def after(self, inside: dict) -> list[PyTree]:
        """The other arrays of the objects after the evaluation."""
        *_, rest = self._parts(tuple(inside[slot] for slot in self.slots))
        paths = [
            {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(trees)}
            for trees in (self._rest, rest)
        ]
        if self._kind is not None and paths[0] != paths[1]:
            other = min(paths[0] ^ paths[1])
            raise ValueError(
                f"`loss_fn` must not add or remove variables of an {self._kind.name} object, got a "
                f"change of {other}: return such values with `has_aux=True`, instead of sowing them"
            )
        return rest

    def update(self, rest: list[PyTree], axis_name: AxisName) -> None:
        """Writes the arrays, averaged over the workers, into the given objects."""
        if self._kind is not None:
            with self._kind.averaged(self._given, axis_name):
                self._kind.update(self._given, rest)

    def part(self, grads: list[PyTree], slot: Any) -> PyTree:
        """The gradient of one argument."""
        return grads[self.slots.index(slot)]


def _floats(tree: PyTree) -> list[bool]:
    leaves = zip(jax.tree.leaves(tree), objects.dynamic(tree), strict=True)
    return [known and jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x, known in leaves]


def _named_keys(slots: dict, count: int, others: tuple, argnums: Any, argnames: Any) -> set:
    """The arguments that are named as keys, checked.

    Args:
        slots: the arguments of the loss, by number or keyword.
        count: how many of them are positional.
        others: the arguments that cannot be keys: differentiated ones and objects.
        argnums: `key_argnums`.
        argnames: `key_argnames`.
    """
    found = set()
    for number in (argnums,) if isinstance(argnums, int) else argnums:
        if not -count <= number < count or number % count in others:
            raise ValueError(
                f"`key_argnums` must be numbers of the {count} positional arguments that are not "
                f"differentiated, got {number}"
            )
        found.add(number % count)
    for name in (argnames,) if isinstance(argnames, str) else argnames:
        if name not in slots or name in others:
            keywords = tuple(slot for slot in slots if isinstance(slot, str))
            raise ValueError(
                f"`key_argnames` must name arguments that are passed by keyword, {keywords}, got "
                f"{name!r}; name a positional one by `key_argnums`"
            )
        found.add(name)
    for slot in found:
        for leaf in jax.tree.leaves(slots[slot]):
            if not (_is_typed_key(leaf) or _is_raw_key(leaf)):
                raise ValueError(
                    "`key_argnums` and `key_argnames` must name PRNG keys, uint32 of shape (..., "
                    f"2), (..., 4) or typed, got {jnp.result_type(leaf)} of shape "
                    f"{jnp.shape(leaf)} in argument {slot!r}"
                )
    return found


def _is_typed_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_raw_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and leaf.dtype == jnp.uint32 and leaf.shape[-1:] in ((2,), (4,))


def _kind_of(raw: Any) -> str:
    """The kind of a raw key: the default one, if its keys have as many words."""
    default = jax.config.jax_default_prng_impl  # pyright: ignore[reportAttributeAccessIssue]
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=default))).shape[-1]
    return default if words == raw.shape[-1] else "threefry2x32" if raw.shape[-1] == 2 else "rbg"


def fold_in_worker(tree: PyTree, axis_name: AxisName, *, raw: bool = False) -> PyTree:
    """Folds the worker's index into the tree's typed keys; with `raw`, into raw ones too."""

    def fold(key: Any) -> Any:
        typed = _is_typed_key(key)
        if not typed and not raw:
            return key
        if axes.varies(key, axis_name):
            return key
        worker = lax.axis_index(axis_name)
        keys = key if typed else jax.random.wrap_key_data(key, impl=_kind_of(key))
        keys = jax.vmap(lambda k: jax.random.fold_in(k, worker))(keys.reshape(-1))
        return (keys if typed else jax.random.key_data(keys)).reshape(key.shape)

    return jax.tree.map(fold, tree)


def _check_own(loss: Any, axis_name: AxisName) -> None:
    if axes.typed(axis_name) and not axes.varies(loss, axis_name):
        raise ValueError(
            f"`loss_fn` must return this worker's own loss, got one that is already the same on "
            f"all workers of {axis_name!r}, whose gradient would be wrong by the number of "
            "workers. Return the loss without jax.lax.pmean or psum: jaxcomp.value_and_grad "
            "averages the loss that it returns."
        )


def _metric(x: Any, axis_name: AxisName) -> Any:
    known = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating) and jnp.ndim(x) == 0
    if not known or (axes.typed(axis_name) and not axes.varies(x, axis_name)):
        return x
    return lax.pmean(x, axis_name)
