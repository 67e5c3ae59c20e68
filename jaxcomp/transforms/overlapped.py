"""Local updates whose exchanges run while the next steps compute."""

import functools
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxcomp.gates.periods import Constant
from jaxcomp.mesh import placement
from jaxcomp.mesh.beside import beside, move_arrays
from jaxcomp.mesh.data_parallel import data_parallel
from jaxcomp.mesh.gradients import local
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.mesh.place import place
from jaxcomp.transforms import (
    fragments as fragments_,
    local_exchange as exchange_,
    local_steps as steps_,
)
from jaxcomp.transforms.local_steps import FragmentState, LocalUpdatesState, Setup
from jaxcomp.transforms.local_updates import LocalUpdates
from jaxcomp.transforms.view import view
from jaxcomp.types import AxisName, PyTree


class Exchange(NamedTuple):
    """The result of an exchange: the mean, the memory of its codec, and how long it took."""

    mean: PyTree
    memory: Any
    seconds: float


class InFlight(NamedTuple):
    """The state of `local_updates`, with exchanges that may be under way.

    Attributes:
        steps: the state, where memory of means, and pending ones, are elsewhere.
        waited: the number of steps of the current round.
        memory: for each fragment, the memory of its mean, on the mesh of the exchange.
        pending: for each fragment, the mean that waits for its delay: an exchange that is under
            way, or the last one that has ended.
    """

    steps: LocalUpdatesState
    waited: int
    memory: tuple[Any, ...]
    pending: tuple[Any, ...]


class Times(NamedTuple):
    """How long exchanges took, and how long training stood still for them.

    Attributes:
        exchanges: how many have moved the centre.
        seconds: how long they took, from a pseudo-gradient to its mean.
        waited: how long steps had to wait for them.
    """

    exchanges: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    @property
    def hidden(self) -> float:
        """The share of the exchanges during which steps went on, from 0 to 1."""
        return 1 - self.waited / self.seconds if self.seconds else 1.0


def _setup_of(tx: Any) -> Setup:
    """The arguments of the transformation, if exchanges can run beside its steps."""
    if not isinstance(tx, LocalUpdates):
        raise ValueError(
            "`tx` must be jaxcomp.local_updates(...), or a recipe that returns one, neither "
            f"wrapped nor chained, got {type(tx).__name__}; wrap its inner optimizer instead"
        )
    setup = tx.setup
    if not setup.delay:
        raise ValueError(
            "`tx` must have a delay of at least one step, in which an exchange can run, got "
            "delay=0; use jaxcomp.local_updates(..., delay=...), or the step of "
            "jaxcomp.data_parallel"
        )
    if setup.synchronous:
        raise ValueError(
            "`tx` must not begin with synchronous steps, which exchange gradients, got "
            f"synchronous={setup.synchronous}; take them with jaxcomp.data_parallel first"
        )
    return setup


def _warn_if_in_turns(mesh: Mesh) -> None:
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if len(own) > 1 and own[0].platform == "cpu":
        warnings.warn(
            "jaxcomp.Overlapped hides nothing where a process has several CPU devices in the mesh, "
            f"here {len(own)}: XLA runs programs of several CPU devices one after another. The "
            "numbers are right; to hide exchanges, start a process for each worker",
            stacklevel=3,
        )


def _put(held: tuple[Any, ...], at: int, new: Any) -> tuple[Any, ...]:
    return (*held[:at], new, *held[at + 1 :])


class Overlapped:
    """Steps of `local_updates` with a delay, whose exchanges run while the next steps compute.

    Within one compiled program nothing makes a collective outlast a step. Here the steps are one
    program, without collectives; an exchange is another one, started by a thread of its own on
    other devices of the same processes: CPU devices, so that those of GPUs exchange through their
    hosts. `τ` steps later its mean moves the centre. If it has not arrived by then, the step waits,
    and `times` says how long.

    The numbers are those of `local_updates` in one program, bit for bit.

    On CPUs a process must have one worker: XLA runs programs of several CPU devices of a process
    one after another, so that steps would wait for every exchange; a warning says so.

    Between several processes, run nothing else with collectives on the devices of the exchanges
    before `settle`, which waits for them. `jax.device_put` of one array for all processes is such a
    program: it compares their values.

    Args:
        tx: `jaxcomp.local_updates(..., delay=τ)`, or a recipe that returns one, such as
            `jaxcomp.algorithms.streaming_diloco`; not wrapped or chained.
        value_and_grad: `value, grads = value_and_grad(params, batch)` of this worker alone, as from
            `jax.value_and_grad(loss_fn)`. It must not average over the workers: that would wait for
            an exchange.
        mesh: the devices of the steps.
        axis_name: the mapped axis of the workers.
        through: the devices of the exchanges, a mesh of the same shape. None takes CPU devices of
            the same processes that `mesh` does not use.

    Raises:
        ValueError: for another transformation, one without a delay, synchronous steps, or a process
            without other CPU devices.

    Example:
        >>> import jaxcomp
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> tx = jaxcomp.local_updates(optax.sgd(0.1), None, "data", every=4, delay=2)
        >>> loss_fn = lambda w, x: ((x @ w - 1) ** 2).mean()
        >>> w = jaxcomp.place(jnp.ones(3), mesh, "data")
        >>> state = jaxcomp.init_state(tx, w, mesh, "data")
        >>> grads = jax.value_and_grad(loss_fn)
        >>> with Overlapped(tx, grads, mesh, "data", through=mesh) as run:  # There is one device.
        ...     for _ in range(8):
        ...         w, state, losses = run(w, state, jnp.ones((8, 3)))
        ...     state = run.settle(state)
        >>> int(state.taken), run.times.exchanges
        (8, 2)

    References:
        Douillard et al., `Streaming DiLoCo with overlapping communication: towards a distributed
        free lunch <https://arxiv.org/abs/2501.18512>`_, 2025.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        value_and_grad: Callable[[PyTree, Any], tuple[Any, PyTree]],
        mesh: Mesh,
        axis_name: AxisName,
        *,
        through: Mesh | None = None,
    ):
        setup = _setup_of(tx)
        self._setup, self._mesh, self._axis_name = setup, mesh, axis_name
        self._through = beside(mesh) if through is None else through
        if self._through.shape != mesh.shape:
            raise ValueError(
                f"`through` must have the axes of the mesh, {dict(mesh.shape)}, got "
                f"{dict(self._through.shape)}"
            )
        _warn_if_in_turns(mesh)
        self._grads = value_and_grad
        self._talks: list[Callable[..., Any]] = []
        self._pool = ThreadPoolExecutor(1, "exchange")
        self.times = Times()
        """The times of the exchanges so far; set it to `Times()` to begin anew."""

    def __enter__(self) -> "Overlapped":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Waits for exchanges that are under way, and ends their thread."""
        self._pool.shutdown()

    def __call__(
        self, params: PyTree, state: "LocalUpdatesState | InFlight", batch: Any
    ) -> tuple[PyTree, InFlight, Any]:
        """One step of every worker, with the exchanges that are due after it.

        Args:
            params: the centre, on the mesh.
            state: from `jaxcomp.init_state`, `settle` or the last step. Its buffers are donated.
            batch: of all workers, split between them along its leading dimension.

        Returns:
            The centre, the state, and what `value_and_grad` returned to each worker, with a leading
            axis of workers.
        """
        if not isinstance(state, InFlight):
            params, state = self._begin(params, state)
        self._check(batch)
        steps, value = self._alone(state.steps, params, batch)
        state = state._replace(steps=steps, waited=state.waited + 1)
        number = len(state.memory)
        for fragment, (taken, moves) in enumerate(steps_.schedule(self._setup, number)):
            if state.waited == taken:
                state = self._sent(fragment, params, state)
            if state.waited == moves:
                params, state = self._moved(fragment, params, state)
        if state.waited == self._every:
            state = state._replace(waited=0)
        return params, state, value.tree

    def settle(self, state: "LocalUpdatesState | InFlight") -> LocalUpdatesState:
        """The state of `local_updates` at this step, after all exchanges under way have ended.

        Save this one: training goes on from it bit for bit, in either form. A mean that waits for
        its step is in it; after a whole number of rounds none waits. It shares buffers with
        `state`, and the next step reuses these: save it before, or go on from it.
        """
        if not isinstance(state, InFlight):
            return state
        fragments = []
        for at, memory, pending in zip(
            state.steps.fragments, state.memory, state.pending, strict=True
        ):
            if isinstance(pending, Future):
                pending, memory, _ = pending.result()
            memory = move_arrays(memory, self._mesh)
            fragments.append(at._replace(mean=memory, pending=pending))
        return state.steps._replace(fragments=tuple(fragments))

    def _check(self, batch: Any) -> None:
        """Between processes, an array that is not on the mesh yet is compared as it gets there."""
        if jax.process_count() > 1 and not all(
            placement.placed(leaf, self._mesh) for leaf in jax.tree.leaves(batch)
        ):
            raise ValueError(
                "`batch` must be arrays on the mesh where there are several processes, got others, "
                "and placing them would wait for the exchanges; make them with "
                "jax.make_array_from_process_local_data"
            )

    @property
    def _every(self) -> int:
        period = self._setup.period
        assert isinstance(period, Constant)  # There is a delay.
        return period.k

    def _begin(self, params: PyTree, state: Any) -> tuple[PyTree, InFlight]:
        if not isinstance(state, LocalUpdatesState):
            raise ValueError(
                "`state` must be that of the transformation, or of the last step, got "
                f"{type(state).__name__}. Make it with jaxcomp.init_state(tx, params, mesh, "
                f"{self._axis_name!r})"
            )
        params = place(params, self._mesh, self._axis_name)
        state = place(state, self._mesh, self._axis_name, params=params)
        steps = [at._replace(mean=(), pending=()) for at in state.fragments]
        if not self._talks:
            self._talks = [self._talk(mean) for mean in steps_.means(self._setup, params)]
        return params, InFlight(
            steps=state._replace(fragments=tuple(steps)),
            waited=int(state.waited),
            memory=tuple(move_arrays(at.mean, self._through) for at in state.fragments),
            pending=tuple(at.pending for at in state.fragments),
        )

    def _sent(self, fragment: int, params: PyTree, state: InFlight) -> InFlight:
        """Takes a fragment's pseudo-gradient, and starts its exchange."""
        part, own = self._part(fragment, params), state.steps.fragments[fragment]
        delta, offset, lost = self._taken(own._replace(outer=()), part, ())
        own = own._replace(offset=offset, lost=lost)
        steps = state.steps._replace(fragments=_put(state.steps.fragments, fragment, own))
        flying = self._pool.submit(self._exchanged, fragment, delta, state.memory[fragment], part)
        return state._replace(steps=steps, pending=_put(state.pending, fragment, flying))

    def _exchanged(self, fragment: int, delta: PyTree, memory: Any, part: PyTree) -> Exchange:
        """An exchange, in the thread: it begins when the pseudo-gradient is there."""
        jax.block_until_ready(delta)
        start = time.perf_counter()
        delta, part = move_arrays((delta, part), self._through)
        mean, memory = self._talks[fragment](delta, memory, part, ())
        mean = jax.block_until_ready(move_arrays(mean, self._mesh))
        return Exchange(mean, memory, time.perf_counter() - start)

    def _moved(self, fragment: int, params: PyTree, state: InFlight) -> tuple[PyTree, InFlight]:
        """Moves the centre by a fragment's mean, and waits for it if it is late."""
        pending, memory = state.pending[fragment], state.memory[fragment]
        if isinstance(pending, Future):
            jax.block_until_ready(state.steps)  # What follows is waiting for the exchange alone.
            start = time.perf_counter()
            pending, memory, seconds = pending.result()
            waited = min(time.perf_counter() - start, seconds)
            so_far = self.times
            self.times = Times(
                so_far.exchanges + 1, so_far.seconds + seconds, so_far.waited + waited
            )
        own, part = state.steps.fragments[fragment], self._part(fragment, params)
        part, own = self._apply(part, own, pending, ())
        parts = list(fragments_.split(self._setup.fragments, params, params))
        parts[fragment] = part
        steps = state.steps._replace(fragments=_put(state.steps.fragments, fragment, own))
        return fragments_.merge(tuple(parts)), state._replace(
            steps=steps,
            memory=_put(state.memory, fragment, memory),
            pending=_put(state.pending, fragment, pending),
        )

    def _part(self, fragment: int, params: PyTree) -> PyTree:
        return fragments_.split(self._setup.fragments, params, params)[fragment]

    @functools.cached_property
    def _alone(self) -> Callable[..., Any]:
        """A step of every worker alone: the program without collectives."""

        def step(state: LocalUpdatesState, params: PyTree, batch: Any) -> tuple[Any, PerWorker]:
            value, grads = self._grads(local(view(params, state), self._axis_name), batch)
            state = steps_.alone(self._setup, grads, state, params, {})
            state = state._replace(waited=jnp.where(state.waited >= self._every, 0, state.waited))
            left = steps_.left(self._setup, len(state.fragments), state)
            value = PerWorker.wrap(value, "local", self._axis_name)
            return state._replace(left=left), value

        return data_parallel(step, self._mesh, self._axis_name, donate_argnums=0)

    @functools.cached_property
    def _taken(self) -> Callable[..., Any]:
        """The pseudo-gradient of each worker, its offset, and how many exchanges it has lost."""

        def take(
            fragment: FragmentState, part: PyTree, _: Any
        ) -> tuple[PerWorker, PerWorker, PerWorker]:
            delta, _, fragment = exchange_.message(self._setup, fragment, part)
            return PerWorker.wrap(delta, "local", self._axis_name), fragment.offset, fragment.lost

        return data_parallel(take, self._mesh, self._axis_name)

    def _talk(self, mean: Any) -> Callable[..., Any]:
        """The exchange of a fragment: the only program with collectives."""

        def talk(delta: PerWorker, memory: Any, part: PyTree, _: Any) -> tuple[PyTree, Any]:
            return exchange_.average(self._setup, mean, delta.own(), memory, part)

        return data_parallel(talk, self._through, self._axis_name, donate_argnums=(0, 1))

    @functools.cached_property
    def _apply(self) -> Callable[..., Any]:
        """The step of the outer optimizer."""

        def move(part: PyTree, at: FragmentState, mean: PyTree, _: Any) -> tuple[PyTree, Any]:
            update, at = exchange_.move_center(self._setup, at, mean, part)
            return optax.apply_updates(part, update), at

        return data_parallel(move, self._mesh, self._axis_name, donate_argnums=1)
