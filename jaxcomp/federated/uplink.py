"""The way up: a client's update → the message it sends, and the message as the server reads it."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp import checks
from jaxcomp.base import Codec, Feedback
from jaxcomp.exchange import guarding, send
from jaxcomp.federated.side import NoSide, Side
from jaxcomp.feedback import Link, NoFeedback, Residual, default
from jaxcomp.layout import trees
from jaxcomp.layout.policy import Policy
from jaxcomp.layout.trees import Layout, TreePayload
from jaxcomp.types import Array, PyTree, Stacks


@dataclasses.dataclass(frozen=True)
class Uplink:
    """The way of a client's update: a link, and the server's side information.

    Args:
        link: a `Link`; a codec or a policy has the feedback that the codec needs: a `Residual` if
            it is biased, else none.
        side: what the decoder knows beside the message, for codecs that make use of it; with
            `GlobalModel`, what the encoder alone knows.

    Raises:
        ValueError: for a codec that needs the clients to agree on something before they send, a
            feedback that needs the mean of all messages or leaves out absent clients, or side
            information for a codec that makes no use of it.

    Example:
        >>> import jaxcomp
        >>> Uplink(jaxcomp.top_k(fraction=0.01)).link.feedback
        Residual(decay=1.0, dtype=None)
    """

    link: "Link | Codec | Policy"
    side: Side = NoSide()

    def __post_init__(self):
        object.__setattr__(self, "link", as_link("link", self.link))
        checks.part("side", self.side, Side)
        for codec in self.policy.codecs:
            if codec.facts.agrees:
                raise ValueError(
                    f"`link` must have a codec that a client can use alone, got {codec!r}, for "
                    "which all clients would have to agree first; use for example "
                    "jaxcomp.qsgd_inf(bits=4)"
                )
            if self.guided and not codec.facts.guided:
                raise ValueError(
                    f"`side` must be NoSide() for a codec that is not guided by guesses, got "
                    f"{self.side!r} with {codec!r}; use for example jaxcomp.wyner_ziv()"
                )
            _check_pair(codec, self.side)
        if self.feedback.facts.needs_mean:
            raise ValueError(
                "`link` must have a feedback that needs a client's own message only, such as "
                f"jaxcomp.Residual(), got {self.feedback!r}, which needs the mean of all"
            )

        if self.feedback.facts.forgets_absent:
            raise ValueError(
                "`link` must have a feedback that remembers absent clients, such as "
                f"jaxcomp.Shift(step), got {self.feedback!r}"
            )

    @property
    def feedback(self) -> Feedback:
        """The clients' memory."""
        return self.link.feedback  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def policy(self) -> Policy:
        """The codec of each leaf."""
        return self.link.policy  # pyright: ignore[reportAttributeAccessIssue]

    def plan(self, like: PyTree) -> Layout:
        """The plan of messages of trees like this."""
        return plan(self.link, like)  # pyright: ignore[reportArgumentType]

    @property
    def guided(self) -> bool:
        """Whether clients encode with side information."""
        return not isinstance(self.side, NoSide)

    @property
    def guessed(self) -> bool:
        """Whether the server decodes with side information."""
        return self.side.decodes

    @property
    def dense_feedback(self) -> Feedback:
        """The memory of the leaves that are sent dense.

        A residual is for messages that the server refuses, a shift for clients that do not take
        part in a round: the mirror stands for them, whose updates differ.
        """
        if self.feedback.facts.mirrors:
            return self.feedback
        return Residual() if self.feedback.facts.keeps_unsent else NoFeedback()


def _check_pair(codec: Codec, side: Side) -> None:
    """Raises a `ValueError` unless client and server get the guesses that the codec needs."""
    alone = codec.facts.guided and not codec.facts.sided
    given = not side.decodes and not isinstance(side, NoSide)
    if alone and not given:
        raise ValueError(
            "`side` must be jaxcomp.federated.GlobalModel() for a codec that compares updates with "
            f"the parameters that they change, as jaxcomp.federated.pulseloco has it, got {side!r} "
            f"with {codec!r}"
        )
    if given and not alone:
        raise ValueError(
            "`side` must give the server guesses, such as jaxcomp.federated.LastMean(), for a "
            f"codec that decodes with them, got {side!r} with {codec!r}; with GlobalModel() use "
            "jaxcomp.visible()"
        )


def as_link(name: str, given: "Link | Codec | Policy") -> Link:
    """A link; a bare codec gets the feedback that it needs."""
    if isinstance(given, Link):
        return given
    if not isinstance(given, Codec | Policy):
        raise ValueError(
            f"`{name}` must be a codec such as jaxcomp.qsgd_inf(bits=4), a Policy or a Link, "
            f"got {given!r}"
        )
    return Link(given, default(given))


class Memory(NamedTuple):
    """A client's memory for its messages, between rounds.

    Attributes:
        feedback: the feedback of the compressed leaves.
        dense: that of the leaves that are sent dense.
        codecs: the state of the codec of every batch.
        side: what it knows of the server's side information.
        control: its control variate, the sum of what the server has accepted of it; `()` without.
    """

    feedback: PyTree
    dense: PyTree
    codecs: tuple[PyTree, ...]
    side: PyTree
    control: PyTree = ()


class Message(NamedTuple):
    """A client's message, and the memory that it keeps in either case.

    Attributes:
        payload: the arrays that are sent.
        accepted: the client's memory if the server accepts the message.
        refused: its memory if the server does not, or never gets it.
        sound: whether the update was finite. If not, nothing should be sent, and both memories are
            as they were.
        sent: the payload as a server without side information reads it.
    """

    payload: TreePayload
    accepted: Memory
    refused: Memory
    sound: Array
    sent: tuple[Stacks, Stacks]


def plan(link: Link, like: PyTree) -> Layout:
    """The plan of messages over a link, made once for all trees of these shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(like)
    shapes = tuple(jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves)
    return _made(link, treedef, shapes, jax.config.read("jax_enable_x64"))


@functools.lru_cache(maxsize=512)
def _made(link: Link, treedef: Any, shapes: tuple, wide: bool) -> Layout:
    del wide  # The dtypes of a layout depend on it.
    return trees.layout(link.policy, jax.tree.unflatten(treedef, shapes))


def init(uplink: Uplink, params: PyTree) -> Memory:
    """A client's memory before its first message."""
    plan = uplink.plan(params)
    likes = tuple(batch.like for batch in plan.batches)
    return Memory(
        uplink.feedback.init(likes, ()),
        uplink.dense_feedback.init(plan.dense_likes, ()),
        () if uplink.guided else send.init(plan.batches),
        uplink.side.own(params),
    )


def message(
    uplink: Uplink,
    plan: Layout,
    key: Array,
    number: Array | int,
    weight: Array | float,
    update: PyTree,
    memory: Memory,
    shared: PyTree = (),
    params: PyTree = None,
) -> Message:
    """Compresses a client's update.

    Args:
        uplink: codec, feedback and side information.
        plan: that of the update.
        key: the round's key, `uint32[2]`.
        number: the client's number, with which its private noise is drawn.
        weight: the part of its step that a `Shift` moves, in [0, 1]: 1 unless the server counts the
            message for less than the client's weight; other feedback does not use it.
        update: the client's update.
        memory: its memory.
        shared: what server and clients know alike, of `side`.
        params: the parameters that all know, for `side`.
    """
    stacks, dense = trees.stacks(plan, update)
    whole, dense_memory = uplink.dense_feedback.compensate(dense, memory.dense)
    guesses = uplink.side.at_client(shared, memory.side, params)
    batches, states = plan.batches, memory.codecs
    if uplink.guided:  # A client that has no guess encodes as without side information.
        states = send.init(batches) if guesses is None else stack_guesses(plan, guesses)
    known = send.Memory(memory.feedback, states)
    who = jnp.asarray(number)
    own = send.send(key, batches, stacks, known, who, feedback=uplink.feedback)

    def kept(weight: Array | float) -> tuple[PyTree, PyTree]:
        factor = jnp.asarray(weight, jnp.float32)
        held = own.memory.feedback
        main = uplink.feedback.update(own.message, own.sent, (), 1.0, factor, held)[1]
        return main, uplink.dense_feedback.update(whole, whole, (), 1.0, factor, dense_memory)[1]

    side = memory.side
    if guesses is not None:
        side = uplink.side.sent(side, trees.assemble(plan, own.sent, whole))
    codecs = memory.codecs if uplink.guided else own.memory.codecs
    sound = guarding.all_finite((stacks, dense))

    def unless_broken(new: Memory) -> Memory:
        new = new._replace(control=memory.control)  # Its client moves it, once it is accepted.
        return jax.tree.map(lambda a, b: jnp.where(sound, a, b), new, memory)

    return Message(
        TreePayload(own.payloads, tuple(whole)),
        unless_broken(Memory(*kept(weight), codecs, side)),
        unless_broken(Memory(*kept(0.0), memory.codecs, memory.side)),
        sound,
        (own.sent, tuple(whole)),
    )


def unsent(uplink: Uplink, plan: Layout, memory: Memory) -> PyTree:
    """The rest of past messages, which the next one sends, as a tree; None without a residual."""
    if not uplink.feedback.facts.keeps_unsent:
        return None
    main = uplink.feedback.unsent(memory.feedback)
    return trees.assemble(plan, main, uplink.dense_feedback.unsent(memory.dense))


def read(
    plan: Layout,
    key: Array,
    number: Array | int,
    payload: TreePayload,
    guesses: PyTree | None = None,
) -> tuple[Stacks, Stacks]:
    """A payload as the server reads it: an array for each batch, and the dense leaves."""
    sides = (None,) * len(plan.batches) if guesses is None else stack_guesses(plan, guesses)
    # Decoded to memory: no compiler can fuse the last product of a decoder with the sum after it.
    stacks = send.decode(key, plan.batches, payload.batches, sides, jnp.asarray(number))
    return stacks, payload.dense


def stack_guesses(plan: Layout, guesses: PyTree) -> tuple[Array, ...]:
    """Guesses with a leading axis as `[alternatives, buckets, size]` for each batch."""
    return jax.vmap(lambda tree: trees.stacks(plan, tree)[0])(guesses)
