"""`compressed_value_and_grad`: `jax.value_and_grad` for programs with automatic sharding."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxcomp import checks
from jaxcomp.backend import axes
from jaxcomp.base import Codec, Gate, Reducer
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import Policy
from jaxcomp.mesh import axis_types, data_parallel as mapped, gradients, placement, specs as specs_
from jaxcomp.mesh.arguments import Arguments
from jaxcomp.transforms import outputs
from jaxcomp.transforms.mean import compressed_mean
from jaxcomp.transforms.worker_loss import Weight, WorkerLoss
from jaxcomp.types import AxisName, PyTree


def compressed_value_and_grad(
    loss_fn: Callable[..., Any],
    mesh: Mesh,
    axis_name: AxisName,
    codec: "Codec | Policy | Link | Reducer",
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | tuple[int, ...] | None = None,
    batch_argnames: str | tuple[str, ...] = (),
    sums: tuple[str, ...] = (),
    weight: Weight = None,
    param_specs: PyTree | None = None,
    wrt: Any = None,
    key_argnums: int | Sequence[int] = (),
    value_and_grad: Callable[..., Any] | None = None,
    gate: Gate | None = None,
    guard: bool = True,
    stats: Any = False,
    adapt: bool = True,
    check_vma: bool = False,
) -> "CompressedValueAndGrad":
    """Like `jax.value_and_grad` of the whole batch, with compressed messages between workers.

    It is for a program with automatic sharding: one `jax.jit`, in which the compiler adds up the
    gradients of all devices. Put it in the place of `jax.value_and_grad`; nothing else of the
    program changes. Each worker differentiates the loss of its own part of the batch, and their
    gradients are averaged as by `compressed_mean`. The other axes of the mesh stay with the
    compiler. Gradients lie like the parameters.

        gradient = Σ wᵢ · D(C(∇ loss(params, batch part i))) / Σ wᵢ

    Args:
        loss_fn: the mean over its batch, one number, or with `has_aux` a pair of it and a tree.
        mesh: the mesh of the program.
        axis_name: the axis between whose devices links are slow, or a tuple of axes. Parameters are
            replicated over it, and the batch is split over it.
        codec: as for `compressed_mean`.
        argnums: the numbers of the arguments to differentiate.
        has_aux: whether the loss returns a tree beside its value. Of this tree, rows of examples
            stay split over the workers, floating numbers that differ are averaged as the loss is,
            sums are added up if `sums` names them, and what is the same on all workers is returned
            as it is. Random keys are returned as they were given, or else are those of the first
            worker. All else is refused, as are sums without a name.
        batch_argnums: the numbers of the arguments that are batches, which are split along the
            first dimension of each array; None, without names too, for the last argument.
        batch_argnames: the names of batches.
        sums: globs of paths in the tree beside the loss, such as `("total_weights",)`.
        weight: how much a worker counts, where the loss is a mean over unequal numbers, such as
            tokens that are no padding: the path of that number beside the loss, or a function of
            the batches that returns it. 1.0 counts all workers equally; None too, but a loss that
            is divided by such a number is refused.
        param_specs: as for `compressed_mean`: how the parameters are sharded over the other axes.
            None reads it from the types of the arguments, if the mesh has explicit axes.
        wrt: for an nnx object, the filter of the variables to differentiate; None for `nnx.Param`.
        key_argnums: the numbers of arguments that are raw keys, to be folded by worker as typed
            ones are.
        value_and_grad: called as `value_and_grad(loss_fn, argnums=argnums, has_aux=has_aux)` in
            place of `jax.value_and_grad`, such as a function that accumulates gradients.
        gate: as for `compressed_mean`.
        guard: as for `compressed_mean`.
        stats: as for `compressed_mean`.
        adapt: whether constraints and nested `jax.shard_map`s inside of the loss, which name this
            axis or hold the mesh, are adapted while the loss is traced: the axis is left out, and
            the mesh is the current one. JAX's functions are replaced meanwhile, in this thread.
        check_vma: whether JAX tracks which values differ between workers. With True, a loop that
            begins with zeros may be refused, and `jax.shard_map(..., check_vma=False)` inside is.

    Returns:
        `f(*args, key=step)` which returns `(value, gradients)`. With memory,
        `f(*args, key=step, memory=memory)` returns `(value, gradients, memory)`; its `init(params)`
        makes the memory, and its `tx` is the `compressed_mean`, for `jaxcomp.resize_workers`.

    Raises:
        ValueError: for arguments of the wrong kind; on use, for a key that is missing, a codec that
            needs memory and gets none, a batch that the workers do not divide, a loss that is a sum
            or is divided by a count of the worker's own, and values beside it that are neither.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcomp
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> loss_fn = lambda params, batch: ((batch @ params["w"]) ** 2).mean()
        >>> grad_fn = compressed_value_and_grad(loss_fn, mesh, "data", jaxcomp.qsgd_inf(bits=4))
        >>> loss, grads = jax.jit(grad_fn)({"w": jnp.ones((64, 64))}, jnp.ones((8, 64)), key=0)
        >>> grads["w"].shape
        (64, 64)

    Note:
        Memory differs between workers. `jax.jit` of the program takes and returns it as any state,
        and it is stored with it.
    """
    checks.function("loss_fn", loss_fn)
    given = Arguments(loss_fn, batch_argnums, batch_argnames, (), ())
    if not isinstance(sums, tuple) or not all(isinstance(one, str) for one in sums):
        raise ValueError(f"`sums` must be a tuple of globs such as ('tokens',), got {sums!r}")
    if sums and not has_aux:
        raise ValueError("`sums` needs has_aux=True, and a tree beside the loss")
    if isinstance(weight, str) and not has_aux:
        raise ValueError(f"`weight`={weight!r} needs has_aux=True, and a tree beside the loss")
    if not (weight is None or isinstance(weight, str | int | float) or callable(weight)):
        raise ValueError(
            "`weight` must be the path of a value beside the loss, a function of the batches, "
            f"1.0 or None, got {weight!r}"
        )

    if value_and_grad is None:
        own = gradients.own_value_and_grad(
            loss_fn, axis_name, argnums, has_aux, wrt, True, key_argnums
        )
    else:
        own = _foreign(value_and_grad, loss_fn, argnums, has_aux, axis_name, key_argnums)
    mean = functools.partial(compressed_mean, codec, axis_name, gate=gate, guard=guard, stats=stats)
    worker = WorkerLoss(
        loss_fn if value_and_grad is None else lambda *args, **kwargs: own(*args, **kwargs)[0],
        own, axis_name, has_aux or value_and_grad is not None, sums, weight,
    )  # fmt: skip
    options = {"adapt": adapt, "check_vma": check_vma}
    return CompressedValueAndGrad(worker, mesh, argnums, has_aux, given, mean, param_specs, options)


class CompressedValueAndGrad:
    """The value and the compressed gradients of a loss, as a function of its arguments.

    Attributes:
        tx: the transformation that averages the gradients, for `jaxcomp.resize_workers`.
    """

    def __init__(
        self,
        worker: WorkerLoss,
        mesh: Mesh,
        argnums: int | Sequence[int],
        has_aux: bool,
        given: Arguments,
        mean: Callable[..., Any],
        param_specs: PyTree | None,
        options: dict[str, Any],
    ):
        self._worker, self._mesh, self._argnums, self._has_aux = worker, mesh, argnums, has_aux
        self._given, self._mean, self._specs, self._options = given, mean, param_specs, options
        self.tx = mean(param_specs=param_specs)
        self._numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        self._steps = functools.lru_cache(maxsize=64)(self._step)
        placement.check_axes(mesh, worker.axis_name)

    def init(self, params: PyTree) -> PyTree:
        """The memory before the first step, on the mesh.

        Args:
            params: the arguments that are differentiated: one, or a tuple of several.
        """
        tx = self._mean(param_specs=self._specs_of(params))
        return mapped.init_state(tx, params, self._mesh, self._worker.axis_name)

    def __call__(self, *args: Any, key: Any = None, memory: PyTree = None, **kwargs: Any) -> Any:
        """The value and the gradients, and with memory the next one.

        Args:
            args: the arguments of the loss.
            key: the number of the step, a `jax.random.key` or a raw key, another one in each step;
                None for that of the memory, which counts its steps.
            memory: the memory, as from `init` or from the step before.
            kwargs: further arguments of the loss.
        """
        if key is None and memory is None:
            raise ValueError(
                "`key` must be the number of the step, a jax.random.key or a raw key, another one "
                "in each step, got None"
            )
        args, keywords = self._given.bind(args, kwargs)
        batches = self._given.which(len(args), keywords)
        numbers = self._numbers
        if wrong := batches & {number % len(args) for number in numbers}:
            raise ValueError(
                f"`batch_argnums` must name other arguments than `argnums`, got {min(wrong)} in "
                "both: name the batches"
            )
        trained = tuple(args[number] for number in numbers)
        trained = trained[0] if isinstance(self._argnums, int) else trained
        specs = self._specs_of(trained)
        whole, examples, cuts = list(args), [], []
        for number in numbers:
            whole[number % len(args)] = None
        for number in sorted(batches):  # What has no examples is the same on all workers.
            leaves, treedef = jax.tree.flatten(args[number])
            marks = tuple(jnp.ndim(x) > 0 for x in leaves)
            whole[number] = [x for x, has in zip(leaves, marks, strict=True) if not has]
            examples.append([x for x, has in zip(leaves, marks, strict=True) if has])
            cuts.append((number, treedef, marks))
        leaves, treedef = jax.tree.flatten(specs, is_leaf=specs_.is_spec)
        step = self._steps(tuple(cuts), keywords, treedef, tuple(leaves))
        (loss, aux), grads, memory_ = step(key, memory, trained, tuple(whole), tuple(examples))
        value = (loss, outputs.joined(aux)) if self._has_aux else loss
        return (value, grads) if memory is None else (value, grads, memory_)

    def _step(self, cuts: tuple, keywords: tuple, treedef: Any, leaves: tuple) -> Any:
        """The mapped step of calls of this kind.

        Args:
            cuts: of each batch its number, its tree, and which leaves have examples.
            keywords: the names of the last arguments.
            treedef: the tree of the parameters' specs.
            leaves: its leaves.
        """
        tx = self._mean(param_specs=jax.tree.unflatten(treedef, leaves))

        def step(key: Any, memory: PyTree, params: PyTree, args: tuple, batch: tuple) -> Any:
            whole = list(args)
            alone = isinstance(self._argnums, int)
            for number, own in zip(self._numbers, (params,) if alone else params, strict=True):
                whole[number] = own
            for (number, tree, marks), own in zip(cuts, batch, strict=True):
                split, same = iter(own), iter(args[number])
                found = [next(split) if has else next(same) for has in marks]
                whole[number] = jax.tree.unflatten(tree, found)
            placed, names = len(whole) - len(keywords), {number for number, *_ in cuts}
            return self._worker.run(tx, key, memory, whole, placed, keywords, names)

        return mapped.data_parallel(
            step, self._mesh, self._worker.axis_name, batch_argnums=4, **self._options
        )

    def _specs_of(self, params: PyTree) -> PyTree | None:
        """How the parameters are sharded over the other axes, by their types if not by name."""
        explicit = axis_types.explicit(self._mesh)
        others = tuple(n for n in explicit if n not in axes.names(self._worker.axis_name))
        if self._specs is not None:  # Without boxes, such as those of nnx, which have no hash.
            return jax.tree.map(specs_.spec, self._specs, is_leaf=specs_.is_spec)
        if not others:
            return None

        def one(x: Any) -> PartitionSpec:
            found = jax.typeof(x).sharding if isinstance(x, jax.Array) else None
            return specs_.of_axes(others, found.spec) if found else PartitionSpec()

        return jax.tree.map(one, params)


def _foreign(
    value_and_grad: Callable[..., Any],
    loss_fn: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    axis_name: AxisName,
    key_argnums: int | Sequence[int],
) -> Callable[..., Any]:
    """Somebody's function of a value and gradients, whose value is a pair, with keys by worker."""
    function = value_and_grad(loss_fn, argnums=argnums, has_aux=has_aux)
    raw = (key_argnums,) if isinstance(key_argnums, int) else key_argnums

    def run(*args: Any, **kwargs: Any) -> Any:
        named = {number % len(args) for number in raw}
        own = [gradients.fold_in_worker(x, axis_name, raw=n in named) for n, x in enumerate(args)]
        kwargs = {name: gradients.fold_in_worker(x, axis_name) for name, x in kwargs.items()}
        value, grads = function(*own, **kwargs)
        return value if has_aux else (value, ()), grads

    return run
