"""What a method has sent by each step, and how far it was, written down beside its state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxcomp


class Prices(NamedTuple):
    """Bits of what is sent.

    Attributes:
        up: a worker's message.
        down: what it is sent back; 0 for a gather, in which it decodes the messages of all.
        whole: a dense gradient.
        workers: how many there are.
    """

    up: float
    down: float
    whole: float
    workers: int

    def spent(self, state: Any) -> Any:
        """Bits that a worker has sent and been sent, by the means that the state has counted.

        Under a gate by its messages and rounds. What optimizers with two means call `dense`, and
        MARINA `full`, is whole.
        """
        total = jnp.zeros(())
        for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=_counts):
            if not _counts(node):
                continue
            names = {getattr(part, "name", None) for part in path}
            if "dense" in names:  # A mean in two shots, as the compressed one beside it.
                total += 2 * self.whole * node.step
            elif "full" in names:
                total += self.whole * node.step
            elif node.gate != ():
                sent = node.gate.messages / self.workers
                total += self.up * sent + self.down * node.gate.rounds
            else:
                total += (self.up + self.down) * node.step
        return total


class LedgerState(NamedTuple):
    """State of `kept`.

    Attributes:
        inner: that of the method.
        step: steps taken.
        bits: `[steps]`, sent and heard so far.
        gap: `[steps]`, how far the point was that the method answers for.
    """

    inner: Any
    step: Any
    bits: Any
    gap: Any


def kept(tx: Any, steps: int, prices: Prices, gap: Callable[[Any, Any], Any]) -> Any:
    """The same transformation, with a ledger of each step.

    Args:
        tx: any.
        steps: how many there will be.
        prices: of its messages.
        gap: from parameters and the method's state to a number.
    """
    inner: Any = optax.with_extra_args_support(tx)

    def init_fn(params: Any) -> Any:
        empty = jnp.zeros(steps)
        return LedgerState(inner.init(params), jnp.zeros((), jnp.int32), empty, empty)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, after = inner.update(updates, state.inner, params, **extra)
        bits = state.bits.at[state.step].set(prices.spent(after))
        far = gap(optax.apply_updates(params, updates), after)
        return updates, LedgerState(after, state.step + 1, bits, state.gap.at[state.step].set(far))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def price(codec: jaxcomp.Policy, size: int) -> float:
    """Bits of a message of so many float64, as made."""
    like = {"x": jax.ShapeDtypeStruct((1, size), jnp.float64)}
    return 8.0 * jaxcomp.wire_bytes(codec, like)


def _counts(node: Any) -> bool:
    return {"memory", "gate", "step"} <= set(getattr(node, "_fields", ()))
