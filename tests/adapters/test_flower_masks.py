"""Under Flower's own masks, the sum of integers is the clear one, and nothing of them is lost."""

import copy
import io
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.nodes import CLIENTS, Grid, context_of, identity, sha  # noqa: F401
from helpers.paths import ROOT

import jaxcomp
from jaxcomp import federated

pytest.importorskip("flwr")
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation import quantization
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow

from jaxcomp.adapters import flower
from jaxcomp.adapters.flower.fields import Fields

CODEC = flower.masked_integers(step=1.0, bits=3)  # Integers up to 3: most updates are clipped.
POLICY = jaxcomp.Policy(CODEC, min_size=0, min_ndim=0)


def params():
    return {"w": np.zeros((3, 37), np.float32), "b": np.float32(0), "none": np.zeros(0, np.float32)}


def update(node, round_):
    """Small whole numbers, as a tree."""
    draw = np.random.default_rng((node, round_))
    return jax.tree.map(lambda x: draw.integers(-5, 6, x.shape).astype(np.float32), params())


def loss(params, batch):
    """Its gradient is minus the batch."""
    return -sum(jnp.sum(x * y) for x, y in zip(*map(jax.tree.leaves, (params, batch)), strict=True))


def method(**given):
    work = federated.LocalSteps(loss, optax.sgd(1.0))
    return federated.Method(work, **{"up": jaxcomp.Link(POLICY, jaxcomp.Residual()), **given})


METHOD = method()


class Trainer(NumPyClient):
    """An app of its own, which adds an update to the parameters."""

    def __init__(self, node, give):
        self.node, self.give = node, give

    def fit(self, parameters, config):
        add = jax.tree.leaves(self.give(self.node, config["jaxcomp.round"]))
        return [x + y for x, y in zip(parameters, add, strict=True)], 600, {"node": self.node}


class Nodes(Grid):
    """Nodes with Flower's mod, and what each gives to it.

    Attributes:
        given: the words of each node in each round.
        masked: the words that Flower's mod sends.
    """

    run = types.SimpleNamespace(run_id=1)

    def __init__(self, give=update, clients=CLIENTS, mods=(secaggplus_mod,), method=METHOD, **like):
        self.given, self.give, self.masked = {}, give, []
        inner = flower.masked_mod(method, like.get("like", params()), clients)

        def make(node):
            def spy(message, context, call_next):
                reply = call_next(message, context)
                (words,) = (x.numpy() for x in reply.content["fitres.parameters"].values())
                number = message.content["fitins.config"]["jaxcomp.round"]
                self.given[number, node] = words
                return reply

            def train(context):
                return Trainer(node, lambda *who: self.give(*who)).to_client()

            app = ClientApp(client_fn=train, mods=[*mods, spy, inner])

            def answer(message, context):
                try:
                    return app(message, context)
                except KeyError as error:  # Of Flower's mod, without a client's shares.
                    raise ValueError(str(error)) from error

            return lambda: answer

        super().__init__({100 + number: make(100 + number) for number in range(CLIENTS)})

    def send_and_receive(self, messages, *, timeout=None):
        # Flower gives one record to all nodes, from which each takes what it has read.
        replies = super().send_and_receive(list(map(copy.deepcopy, messages)), timeout=timeout)
        held = [r.content["secaggplus_configs"] for r in replies if r.has_content()]
        self.masked += [one["masked_params"] for one in held if "masked_params" in one]
        return replies


class Listening(flower.MaskedFedAvg):
    """A strategy that remembers the sums."""

    def __init__(self, *args, **given):
        self.sums = {}
        settings = {"min_fit_clients": CLIENTS, "min_available_clients": CLIENTS}
        super().__init__(*args, **settings, **given)

    def aggregate_fit(self, server_round, results, failures):
        (mean,) = parameters_to_ndarrays(results[0][1].parameters)
        self.sums[server_round - 1] = mean * len(results)
        return super().aggregate_fit(server_round, results, failures)


def strategy_of(method=METHOD, clients=CLIENTS, tree=None, **given):
    return Listening(method, params() if tree is None else tree, clients, **given)


def train(grid, strategy, rounds, **ranges):
    fit = SecAggPlusWorkflow(CLIENTS, 3, **{**strategy.ranges, **ranges})
    context, config = Context(1, 1, {}, RecordDict(), {}), ServerConfig(num_rounds=rounds)
    DefaultWorkflow(fit)(grid, LegacyContext(context, config, strategy))


def test_the_masked_sum_is_the_clear_one_and_the_parameters_are_the_simulations():
    grid, strategy, rounds = Nodes(), strategy_of(), 4
    train(grid, strategy, rounds)
    assert set(grid.given) == {(n, 100 + i) for n in range(rounds) for i in range(CLIENTS)}
    for number in range(rounds):
        clear = sum(grid.given[number, 100 + i] for i in range(CLIENTS))
        np.testing.assert_array_equal(np.rint(strategy.sums[number]), clear)
        assert np.any(clear != 0)
    size = len(grid.given[0, 100])
    assert len(grid.masked) == rounds * CLIENTS
    for _, words in grid.masked:
        found = np.load(io.BytesIO(words))  # In eight bytes a word, which all look alike.
        assert (found.shape, found.dtype) == ((size,), np.int64)
        assert found.max() > 2**31 > np.abs(list(grid.given.values())).max()

    def data(numbers, number):
        each = [update(100 + int(n), number) for n in numbers]
        return jax.tree.map(lambda *rows: np.stack(rows)[:, None], *each)

    sim = federated.Simulation(METHOD, params(), CLIENTS, data)
    sim.run(rounds)
    assert sha(strategy.params) == sha(sim.params)
    assert sha(strategy.state) == sha(sim.state)


def is_lost(reply):
    """Whether the answer to a stage of a round, by its record, does not arrive."""
    number, node = int(reply.metadata.group_id) - 1, reply.metadata.src_node_id
    held = reply.content["secaggplus_configs"] if reply.has_content() else {}
    return (
        # It has shared its keys: the others take its masks out of the sum.
        (number == 1 and node == 101 and "masked_params" in held)
        # Too few shares are left to unmask the round.
        or (number == 2 and node > 101 and "shares" in held)
        # Gone before it has shared its keys, it ends the round: Flower asks for its shares.
        or (number == 3 and node == 101 and "pk1" in held)
    )


def test_nothing_is_lost_when_clients_drop_out_and_rounds_fail():
    """What is not in a sum is in a residual, and is sent until the residual is empty."""
    gave = []

    def give(node, number):
        if number >= 4:
            return jax.tree.map(np.zeros_like, params())
        gave.append(update(node, number))
        return gave[-1]

    grid, strategy = Nodes(give), strategy_of()
    grid.spoil = lambda replies: [reply for reply in replies if not is_lost(reply)]
    train(grid, strategy, 20)
    assert set(strategy.sums) == set(range(20)) - {2, 3}
    alive = [n for n in range(CLIENTS) if n != 1]
    clear = sum(grid.given[1, 100 + n] for n in alive)
    np.testing.assert_array_equal(np.rint(strategy.sums[1]), clear)
    assert not np.array_equal(clear + grid.given[1, 101], clear)
    assert all(not np.any(grid.given[19, 100 + n]) for n in range(CLIENTS))
    fields = Fields(limit=3, clients=CLIENTS)
    size = sum(x.size for x in jax.tree.leaves(params()))
    arrived = sum(fields.unpack(np.rint(x).astype(int), size) for x in strategy.sums.values())
    whole = jax.tree.map(lambda *each: sum(each), *gave)
    expected = np.concatenate([np.ravel(x) for x in jax.tree.leaves(whole)])
    np.testing.assert_array_equal(arrived, -expected)  # What is sent is `start - end`.
    assert len(gave) == 4 * CLIENTS - 1


def test_odd_leaves_and_extreme_updates():
    """A client whose update is not finite drops out; one of 1e30 is clipped, as are its words."""
    tree = {"a": jnp.ones((5, 7), jnp.bfloat16), "b": jnp.zeros((), jnp.float32)}
    codec = jaxcomp.Policy(
        flower.masked_integers(2.0**-6),
        rules=(jaxcomp.Rule("b", flower.masked_integers(0.5, bits=4)),),
        min_size=0,
        min_ndim=0,
    )
    given = federated.Method(flower.ELSEWHERE, up=jaxcomp.Link(codec, jaxcomp.Residual()))

    def give(node, number):
        value = {100: 1e30, 101: np.nan, 102: 0.0, 103: -1.0, 104: 2.0**-6}[node]
        return {"a": np.full((5, 7), value, np.float32), "b": np.float32(value)}

    grid, strategy = Nodes(give, method=given, like=tree), strategy_of(given, tree=tree)
    train(grid, strategy, 1)
    alive = [grid.given[0, node] for node in (100, 102, 103, 104)]
    assert len(grid.given) == 4
    np.testing.assert_array_equal(np.rint(strategy.sums[0]), sum(alive))
    # 127 steps of 1e30, none of NaN and 0, 64 of -1, and 1; bfloat16 rounds 1 + 2**-6 to itself.
    want = {"a": 1 + (127 + 0 - 64 + 1) / 64 / 4, "b": (7 + 0 - 2 + 0) / 2 / 4}
    assert jax.tree.map(lambda x: x.dtype, strategy.params) == jax.tree.map(lambda x: x.dtype, tree)
    np.testing.assert_array_equal(
        np.asarray(strategy.params["a"]), np.full((5, 7), want["a"], jnp.bfloat16)
    )
    assert float(strategy.params["b"]) == want["b"]


@pytest.mark.parametrize(("limit", "clients"), [(1, 2), (7, 10), (127, 2), (127, 10**6), (3, 5)])
def test_flowers_mod_leaves_the_largest_words_as_they_are(limit, clients):
    fields = Fields(limit=limit, clients=clients)
    draw = np.random.default_rng(limit * clients)
    integers = draw.integers(-limit, limit + 1, (fields.number, 5))
    integers[:, 0], integers[:, 1] = limit, -limit  # Words are planar: these are their fields.
    integers = integers.ravel()[:-2]
    words = fields.pack(integers)
    assert words.max() == fields.largest == -words.min()
    ranges = fields.ranges
    between = (ranges["clipping_range"], ranges["quantization_range"])
    (lifted,) = quantization.quantize([words * 1.0], *between)
    np.testing.assert_array_equal(lifted, words + fields.largest)
    assert lifted.dtype == np.int32
    # Neither the sum of so many, nor that of their factors, reaches the modulus.
    assert clients * max(int(lifted.max()), between[1]) < ranges["modulus_range"]
    most = clients * integers
    np.testing.assert_array_equal(fields.unpack(clients * words, len(integers)), most)


def test_what_has_no_room_in_a_sum_is_refused_before_it_is_sent():
    fields = Fields(limit=7, clients=3)
    with pytest.raises(ValueError, match="`integers` must be at most 7"):
        fields.pack(np.array([0, -8]))
    with pytest.raises(ValueError, match="`words` must be a sum"):
        fields.unpack(4 * fields.pack(np.full(5, 7)), 5)
    with pytest.raises(ValueError, match="`words` must be a sum"):
        fields.unpack(fields.pack(np.full(50, 7)), 5)
    with pytest.raises(ValueError, match="`clients` must be"):
        Fields(limit=127, clients=2**30)
    with pytest.raises(ValueError, match="`clients` must be at least the 5 clients of a round"):
        train(Nodes(clients=4), strategy_of(clients=4), 1)
    for wrong in ({"max_weight": 1000.0}, {"clipping_range": 8.0}):
        grid, strategy = Nodes(), strategy_of()
        train(grid, strategy, 1, **wrong)
        assert (grid.given, strategy.sums) == ({}, {})
    # A client says that the server's strategy has other room than its own.
    grid, strategy = Nodes(clients=7), strategy_of()
    train(grid, strategy, 1)
    assert (grid.given, strategy.sums) == ({}, {})


def test_a_client_without_masks_sends_nothing():
    mod, state = flower.masked_mod(METHOD, params(), CLIENTS), RecordDict()
    context = types.SimpleNamespace(state=state)
    message = types.SimpleNamespace(metadata=types.SimpleNamespace(message_type="train"))
    with pytest.raises(ValueError, match="`mods` must be"):
        mod(message, context, None)
    message.metadata.message_type = "evaluate"
    assert mod(message, context, lambda *given: given) == (message, context)


def test_a_sum_that_no_clients_can_have_is_left_out():
    strategy = strategy_of()
    before = sha(strategy.state)
    words = np.full(len(strategy._coded.pack(zero_message(strategy))), 2.0**30)
    result = types.SimpleNamespace(parameters=ndarrays_to_parameters([words]), metrics={})
    assert strategy.aggregate_fit(1, [(None, result)] * 3, []) == (None, {})
    assert (sha(strategy.state), strategy.spoilt) == (before, 1)


def zero_message(strategy):
    plan = METHOD.uplink.plan(params())
    return tuple(jnp.zeros(b.like.shape, b.dtype) for b in plan.batches), (np.zeros(0),)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"up": CODEC}, "small leaves get it with"),
        ({"up": jaxcomp.Policy(jaxcomp.sign(), min_size=0, min_ndim=0)}, "masked_integers"),
        ({"sampling": federated.Exactly(2)}, "Flower draws"),
        ({"mean": "all"}, "'participants'"),
        ({"down": jaxcomp.qsgd_inf(bits=4)}, "`down` must be None"),
        (
            {"up": jaxcomp.qsgd_inf(bits=4),
             "aggregate": jaxcomp.aggregates.ClippedMean(1.0)},
            "others need single messages",
        ),
    ],
)  # fmt: skip
def test_a_method_that_needs_more_than_the_sum_is_refused(given, says):
    with pytest.raises(ValueError, match=says):
        strategy_of(method(**given))


@pytest.mark.full
def test_the_page_trains_and_accounts(capsys):
    """`docs/privacy.md`: a task, a client and a server under masks; and noise with its epsilon."""
    pytest.importorskip("dp_accounting")
    page = re.sub(r"from \.task .*", "", (ROOT / "docs" / "privacy.md").read_text())
    *masks, noise = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict = {}
    exec(masks[0] + masks[1], names)
    app = names["app"]
    exec(masks[2], names)
    grid = Nodes()
    grid.apps = {node: lambda: app for node in grid.apps}
    names["main"](grid, context_of(1))
    assert capsys.readouterr().out.startswith("0.875 0\n")
    exec(noise, names)
    assert re.search(
        r"epsilon \d+\.\d\d for a client that is added or removed", capsys.readouterr().out
    )


def test_a_step_is_a_power_of_two():
    assert jaxcomp.Link(CODEC, jaxcomp.Residual()).feedback == jaxcomp.Residual()
    for wrong in ({"step": 0.3}, {"step": 0.0}, {"step": 1.0, "bits": 9}):
        with pytest.raises(ValueError, match=r"`(step|bits)` must be"):
            flower.masked_integers(**wrong)
