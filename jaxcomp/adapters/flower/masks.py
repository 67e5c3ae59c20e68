"""Integers under the masks of Flower's SecAgg+: the server gets their sum alone.

Flower's mod multiplies, clips and rounds the numbers that a client gives it. With the settings of
`MaskedFedAvg.ranges` all of that leaves whole numbers as they are.
"""

import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp import checks
from jaxcomp.adapters.flower import client, extra, memory as memory_, raw, records
from jaxcomp.adapters.flower.fields import Fields
from jaxcomp.adapters.flower.memory import Centre, Kept
from jaxcomp.adapters.flower.records import Instruction
from jaxcomp.adapters.flower.server_round import log
from jaxcomp.aggregates import Mean
from jaxcomp.codecs import Quantizer
from jaxcomp.federated import server
from jaxcomp.federated.block import Known
from jaxcomp.federated.method import Method
from jaxcomp.federated.sampling import Everyone
from jaxcomp.federated.server import ServerState
from jaxcomp.layout import trees
from jaxcomp.numerics import addition, noise
from jaxcomp.quantize.levels import Uniform
from jaxcomp.quantize.rounding import Nearest, Stochastic
from jaxcomp.quantize.scales import Fixed
from jaxcomp.types import PyTree, Stacks

_PREFIX = "jaxcomp."
_STATE = "secaggplus_state"
"""The record in which Flower's mod keeps the settings of a round."""


def masked_integers(step: float, bits: int = 8, *, dithered: bool = False) -> Quantizer:
    """Integers with a step that is fixed before the round, so that sums of them need no scales.

    `x̂ = step · clip(round(x / step), −limit, limit)` with `limit = 2^(bits − 1) − 1`. With
    `jaxcomp.Residual()`, a client sends later what rounding and clipping left out.

    Args:
        step: a power of two, in units of the parameters. `limit · step` should be about as large as
            the largest element of a client's update.
        bits: the width of a client's integer, 2 to 8.
        dithered: False rounds to nearest; True rounds at random, which is unbiased for elements
            that are not clipped, for clients that keep no residual.

    Raises:
        ValueError: for another width, or a step that is no power of two from 2⁻¹⁰⁰ to 2¹⁰⁰.

    Example:
        >>> import jaxcomp
        >>> x = jnp.array([0.3, -0.1, 100.0])
        >>> jaxcomp.roundtrip(masked_integers(step=0.25), 0, x)
        Array([ 0.25,  0.  , 31.75], dtype=float32)
    """
    checks.integer("bits", bits, 2, 8)
    checks.number("step", step, 2.0**-100, 2.0**100)
    if math.frexp(step)[0] != 0.5:
        raise ValueError(f"`step` must be a power of two, such as 2**-10, got {step}")
    limit = 2 ** (bits - 1) - 1
    return Quantizer(
        levels=Uniform(steps=limit),
        scale=Fixed(size=float(limit * step)),
        rounding=Stochastic() if dithered else Nearest(),
        bucket_size=None,
    )


def masked_mod(
    method: Method, like: PyTree, clients: int
) -> Callable[[Any, Any, Callable[[Any, Any], Any]], Any]:
    """A mod inside Flower's: `ClientApp(..., mods=[secaggplus_mod, masked_mod(method, like, n)])`.

    The app gets the parameters, trains in any framework, and returns the new parameters, as with
    `flwr`'s `FedAvg`. This mod gives the integers of the method's message to Flower's mod, which
    masks them. All clients count alike: how many examples an app reports is not passed on. What
    rounding and clipping leave out, and messages of rounds that failed, stay in the residual, which
    is in Flower's context.

    Args:
        method: the method, as on the server.
        like: the parameters, or their shapes and dtypes. The app gets bfloat16 as float32.
        clients: the most clients of a round, as on the server.

    Raises:
        ImportError: without Flower.
        ValueError: for a method that cannot be summed under masks; on use, and before anything is
            sent, if the masks are missing, if more clients take part or other ranges are set than
            sums have room for, or if the app returns other or non-finite parameters.
    """
    extra.require()
    like = raw.like(like)
    coded = _Coded(method, like, clients)

    def mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
        if message.metadata.message_type != "train":
            return call_next(message, context)
        coded.check_masks(context.state)
        given = _read_instruction(message.content.get("fitins.config", {}))
        start = coded.read(message.content["fitins.parameters"])
        kept = memory_.read(context.state, method, like, given)
        own, upon = memory_.resume(method, given, kept, start)
        reply = call_next(message, context)
        if reply.has_error():
            raise ValueError(f"the app's own training must succeed, it said {reply.error!r}")
        end = coded.read(reply.content["fitres.parameters"])
        key = jnp.asarray(np.frombuffer(given.seed, np.uint32))
        key = server.round_key(key, given.round)
        known = Known(key, jax.tree.map(lambda x: jnp.asarray(x)[None], start), ())
        sent = client.message_of(method, known, client.who(given, 1), end, own)
        if not sent.sound:
            raise ValueError("the app's parameters must be finite, got NaN or Inf: nothing is sent")
        words = coded.pack(sent.sent)
        of_round = (given.run, given.since, given.round, given.client, given.accepted, upon)
        after = (given.node, Centre(start, ()), own.inner, sent.accepted, sent.refused)
        memory_.write(context.state, Kept(*of_round, *after), extra.RecordDict())
        reply.content["fitres.parameters"] = extra.ArrayRecord({"0": extra.Array(words)})
        reply.content["fitres.num_examples"] = extra.MetricRecord({"num_examples": 1})
        return reply

    return mod


class MaskedFedAvg(extra.LegacyFedAvg):
    """A strategy for Flower's `SecAggPlusWorkflow` that decodes the sum of clients' integers.

    `φ ← φ + server(step · Σᵢ qᵢ / n)` over the `n` clients whose masked integers arrived. The sum
    is exact, whatever the masks are, so the parameters have the bits of `Simulation` with the same
    method and clients. Clients have the mod `masked_mod` inside Flower's. A round in which too many
    clients drop out counts for nobody.

    Args:
        method: the method: `masked_integers` for every leaf, with `jaxcomp.Residual()` or none; the
            server's optimizer. Which clients take part is for Flower's settings to say.
        params: the parameters before the first round.
        clients: the most clients of a round, for which sums have room.
        key: a seed or key, for the noise of rounding at random.
        **settings: of `flwr.server.strategy.FedAvg`, such as `fraction_fit` and `min_fit_clients`;
            `fraction_evaluate` is zero by default.

    Attributes:
        state: the `ServerState`.
        ranges: the arguments of `SecAggPlusWorkflow` with which it leaves integers as they are.
        spoilt: how many sums were not those of honest clients, and were left out.

    Raises:
        ImportError: without Flower.
        ValueError: for a method that cannot be summed under masks; in a round, before anything is
            sent, if it has more clients than `clients`.

    Example:
        >>> strategy = MaskedFedAvg(method, params, clients=10)  # doctest: +SKIP
        >>> masks = SecAggPlusWorkflow(5, 3, **strategy.ranges)  # doctest: +SKIP
        >>> DefaultWorkflow(fit_workflow=masks)(grid, context)  # doctest: +SKIP

    References:
        Bell et al., `Secure single-server aggregation with (poly)logarithmic overhead
        <https://eprint.iacr.org/2020/704>`_, 2020.

    Note:
        The server learns the sum, its number of clients, and the metrics that apps report, which no
        mask covers. Nobody can check a single client's integers: a client that sends others than
        its update spoils the sum. Checkpoints and rejoining are those of Flower, not of
        `CompressedFedAvg`.
    """

    def __init__(
        self, method: Method, params: PyTree, clients: int, *, key: Any = 0, **settings: Any
    ):
        extra.require()
        self._coded = _Coded(method, raw.like(params), clients)
        super().__init__(**{"fraction_evaluate": 0.0, **settings})
        self.method, self.clients, self.key = method, clients, noise.raw(key)
        self.state: ServerState = server.init(method, params, clients)
        self.ranges = self._coded.fields.ranges
        self.spoilt = 0
        self._run, self._since = secrets.token_bytes(8), time.time_ns()
        self._numbers: dict[int, int] = {}
        self._accepted: dict[int, int] = {}

    @property
    def params(self) -> PyTree:
        """The parameters after the last round."""
        return self.state.params

    def initialize_parameters(self, client_manager: Any) -> Any:
        """The parameters before the first round."""
        del client_manager
        return self._coded.write(self.params)

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        """The parameters and a jaxcomp instruction for each client that Flower's FedAvg draws."""
        del parameters  # Those of the state have all their bits.
        params = self._coded.write(self.params)
        pairs = super().configure_fit(server_round, params, client_manager)
        if len(pairs) > self.clients:
            raise ValueError(
                f"`clients` must be at least the {len(pairs)} clients of a round, for which sums "
                f"must have room, got {self.clients}"
            )
        found = []
        for proxy, fit in pairs:
            config = {**fit.config, **self._instruct(server_round - 1, proxy.node_id)}
            found.append((proxy, extra.FitIns(fit.parameters, config)))
        return found

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Moves the parameters by the mean of the clients whose sum Flower has unmasked."""
        del failures
        if not results:
            return None, {}
        count = len(results)
        (mean,) = extra.parameters_to_ndarrays(results[0][1].parameters)
        try:
            # Flower has divided the sum by the number of clients, in float64.
            stacks = self._coded.unpack(np.rint(mean * count).astype(np.int64))
        except ValueError as error:
            self.spoilt += 1
            log.warning("round %d is left out: %s", server_round, error)
            return None, {}
        total = server.nothing(self.method, self.params)  # Leaves without elements stay in it.
        total = total._replace(stacks=stacks, weight=jnp.float32(count), count=jnp.int32(count))
        weights = server.weights_of(self.method, np.ones(self.clients, np.float32))
        key = server.round_key(self.key, server_round - 1)
        self.state, _ = server.step(self.method, key, self.state, total, weights)
        self._accepted.update({proxy.node_id: server_round - 1 for proxy, _ in results})
        reported = [(1, one.metrics) for _, one in results]
        combine = self.fit_metrics_aggregation_fn
        return self._coded.write(self.params), {} if combine is None else combine(reported)

    def _instruct(self, number: int, node: int) -> Mapping[str, Any]:
        """The settings of a round for the client of a node."""
        one = self._numbers.setdefault(node, len(self._numbers))
        seed, accepted = np.asarray(self.key).tobytes(), self._accepted.get(node, -1)
        given = (self._run, number, one, records.WHOLE, accepted, seed, bytes(16), self._since)
        written = Instruction(*given, node.to_bytes(8, "little"), ())._asdict()
        return {_PREFIX + name: value for name, value in written.items() if name != "parts"}


class _Coded:
    """The integers of a method's messages, and their words."""

    def __init__(self, method: Method, like: PyTree, clients: int):
        checks.part("method", method, Method)
        _check(method)
        self._like, self._plan = like, method.uplink.plan(like)
        self._steps = []
        limits = [1]
        given = zip(self._plan.paths, self._plan.codecs, self._plan.likes, strict=True)
        for path, codec, leaf in given:
            step, limit = _grid_of(codec, path) if leaf.size else (1.0, 1)
            self._steps.append(step)
            limits.append(limit)
        self.fields = Fields(limit=max(limits), clients=clients)

    def read(self, arrays: Any) -> PyTree:
        """The parameters in one of Flower's records."""
        likes, treedef = jax.tree.flatten(self._like)
        found = [arrays[name].numpy() for name in arrays if arrays[name].data]
        if [x.shape for x in found] != [x.shape for x in likes]:
            raise ValueError(
                f"the app's parameters must have the shapes {[x.shape for x in likes]}, got "
                f"{[x.shape for x in found]}"
            )
        pairs = zip(found, likes, strict=True)
        return jax.tree.unflatten(treedef, [x.astype(one.dtype) for x, one in pairs])

    def write(self, params: PyTree) -> Any:
        """Parameters as Flower's; files of NumPy have no bfloat16."""
        leaves = [np.asarray(x) for x in jax.tree.leaves(params)]
        leaves = [x.astype(np.float32) if x.dtype.kind == "V" else x for x in leaves]
        return extra.ndarrays_to_parameters(leaves)

    def pack(self, sent: tuple[Stacks, Stacks]) -> np.ndarray:
        """The words of a message.

        Raises:
            ValueError: if it has larger integers than a sum has room for.
        """
        leaves = jax.tree.leaves(trees.assemble(self._plan, *sent))
        pairs = zip(leaves, self._steps, strict=True)
        parts = [np.ravel(np.asarray(x, np.float64)) / step for x, step in pairs]
        return self.fields.pack(np.rint(np.concatenate(parts)).astype(np.int64))

    def unpack(self, words: np.ndarray) -> Stacks:
        """The sum of the messages whose words have this sum.

        Raises:
            ValueError: if it is no such sum.
        """
        likes = self._plan.likes
        integers = self.fields.unpack(words, sum(x.size for x in likes))
        ends = np.cumsum([x.size for x in likes])[:-1]
        parts = zip(np.split(integers, ends), self._steps, likes, strict=True)
        leaves = [(part * step).reshape(like.shape) for part, step, like in parts]
        wide = [dataclasses.replace(b, dtype=addition.wide(b.dtype)) for b in self._plan.batches]
        return tuple(trees.stack(batch, leaves) for batch in wide)

    def check_masks(self, state: Any) -> None:
        """Raises a `ValueError` unless Flower's mod has made masks for integers like these."""
        if _STATE not in state:
            raise ValueError(
                "`mods` must be [secaggplus_mod, masked_mod(...)] on a client whose server runs "
                "SecAggPlusWorkflow, got a message without masks: nothing is sent"
            )
        found, clients = state[_STATE], self.fields.clients
        names = {"quantization_range": "target_range", "modulus_range": "mod_range"}
        for name, value in self.fields.ranges.items():
            if (came := found.get(names.get(name, name))) != value:
                raise ValueError(
                    f"`{name}` of SecAggPlusWorkflow must be {value}, got {came}: pass it "
                    "**strategy.ranges of a MaskedFedAvg of the same method and clients"
                )
        if not 2 <= found.get("sample_num", 0) <= clients:
            raise ValueError(
                f"`clients` must be at least the clients of a round, got {clients} and a round of "
                f"{found.get('sample_num')}"
            )


def _read_instruction(config: Any) -> Instruction:
    found = {name: config.get(_PREFIX + name) for name in Instruction._fields if name != "parts"}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise ValueError(f"a message to train must come from MaskedFedAvg, got none of {missing}")
    return Instruction(**found, parts=())


def _grid_of(codec: Any, path: str) -> tuple[float, int]:
    """The step of a leaf's integers, and the largest one."""
    if isinstance(codec, Quantizer) and isinstance(codec.scale, Fixed):
        limit = codec.levels.magnitude
        step, bits = codec.scale.size / limit, limit.bit_length() + 1
        dithered = isinstance(codec.rounding, Stochastic)
        if codec == masked_integers(step, bits, dithered=dithered):
            return step, limit
    raise ValueError(
        f"`method` must have jaxcomp.adapters.flower.masked_integers(step) for every leaf, got "
        f"{codec!r} for {path!r}; small leaves get it with "
        "jaxcomp.Policy(codec, min_size=0, min_ndim=0)"
    )


def _check(method: Method) -> None:
    """Raises a `ValueError` for a method that needs more than the sum of its messages."""
    wrong = {
        "`work` must have no control variates": method.work.control,
        "`fragments`, `delay` and `mix` must be the default": method.streams,
        "`down` must be None": method.down is not None,
        "`mean` must be 'participants'": method.mean != "participants",
        "`sampling` must be Everyone(): Flower draws the clients": method.sampling != Everyone(),
        "`aggregate` must be Mean(): others need single messages": method.aggregate != Mean(),
        "`up` must have no side information": method.uplink.guided or method.uplink.guessed,
    }
    for says, found in wrong.items():
        if found:
            raise ValueError(f"{says} under masks, got {method!r}")
