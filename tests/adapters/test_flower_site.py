"""A site's process stays up between rounds, and goes on where it was after it was killed."""

import contextlib
import dataclasses
import json
import re
import socket
import threading
import time

import jax
import numpy as np
import optax
import pytest
from helpers.nodes import (
    CLIENTS,
    STEPS,
    Grid,
    data,
    identity,  # noqa: F401
    loss,
    params,
    strategy_of,
)
from helpers.paths import ROOT
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import federated

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, Context, Message, RecordDict

from jaxcomp.adapters import flower
from jaxcomp_site import courier
from jaxcomp_site.app import app as site_app
from jaxcomp_site.packing import packed, unpacked

METHOD = federated.diloco(
    jaxcomp.Link(jaxcomp.top_k(fraction=0.25), jaxcomp.Residual()), loss, inner=optax.adam(1e-2)
)


def own_data(number, taken):
    """The data of the simulation: a round has as many steps for all."""
    return jax.tree.map(lambda x: x[0], data([number], taken // STEPS))


class SiteGrid(Grid):
    """Nodes that hand each message to a site.

    Attributes:
        sites: the site of each node.
        begin: makes the site of a node anew, as after it was killed.
    """

    def __init__(self, folder, method=METHOD, given=own_data, **settings):
        self.begin = lambda node: flower.Site(
            method, params(), given, folder=folder / str(node), **settings
        )
        self.sites = {100 + node: self.begin(100 + node) for node in range(CLIENTS)}
        super().__init__({node: self._app_of(node) for node in self.sites})

    def _app_of(self, node):
        def app():
            def answered(message, context):
                del context
                content = packed(message.content)
                answer = self.sites[node].answer(content)
                return Message(unpacked(answer), reply_to=message)

            return answered

        return app


@pytest.fixture(scope="module")
def undisturbed():
    sim = federated.Simulation(METHOD, params(), CLIENTS, data)
    sim.run(4)
    return sim.params


def test_the_bits_are_those_of_the_simulation_and_sites_know_where_their_data_are(
    undisturbed, tmp_path
):
    grid, strategy = SiteGrid(tmp_path), strategy_of(METHOD)
    strategy.start(grid, num_rounds=4)
    jax.tree.map(np.testing.assert_array_equal, strategy.params, undisturbed)
    assert {site.taken for site in grid.sites.values()} == {4 * STEPS}
    metrics = strategy.reports
    assert len(metrics) == 4


def test_sites_and_the_server_are_killed_and_nobody_notices(undisturbed, tmp_path):
    """Each at another point of a round; an answer that was lost is given again, not worked for."""
    grid, folder = SiteGrid(tmp_path), tmp_path / "server"
    strategy = strategy_of(METHOD, checkpoint=folder)
    strategy.start(grid, num_rounds=1)
    grid.sites[101] = grid.begin(101)  # Killed between two rounds.
    # The server is killed when all have answered its second round.
    messages = strategy.configure_train(2, None, ConfigRecord(), grid)
    grid.send_and_receive(messages)
    taken = {node: site.taken for node, site in grid.sites.items()}
    grid.sites[102] = grid.begin(102)  # Killed after it has answered.
    strategy = strategy_of(METHOD, checkpoint=folder)
    strategy.restore(folder)
    strategy.start(grid, num_rounds=1)
    assert {node: site.taken for node, site in grid.sites.items()} == taken
    strategy.start(grid, num_rounds=2)
    jax.tree.map(np.testing.assert_array_equal, strategy.params, undisturbed)


def test_unequal_sites_take_unequal_numbers_of_steps(tmp_path):
    """Each begins where it stopped; the server weighs them by tokens² / steps."""
    begun = []

    def unequal(number, taken):
        begun.append((number, taken))
        return jax.tree.map(lambda x: np.concatenate([x[0]] * 2)[: 1 + number], data([number], 0))

    grid = SiteGrid(tmp_path, given=unequal, metrics=lambda number, steps: {"tokens": 4 * steps})
    strategy = strategy_of(METHOD, weight_of=federated.tokens_squared_per_step)
    result = strategy.start(grid, num_rounds=2)
    assert sorted(begun) == sorted((n, r * (1 + n)) for n in range(CLIENTS) for r in range(2))
    reported = result.train_metrics_clientapp[1]
    weights = np.arange(1, CLIENTS + 1)
    np.testing.assert_allclose(reported["steps"], np.average(weights, weights=weights))


def test_after_a_refused_message_a_site_reports_all_since_its_last_accepted_one(tmp_path):
    """Its next message has the refused update, and weighs as much."""
    grid = SiteGrid(tmp_path, metrics=lambda number, steps: {"tokens": 8 * steps, "loss": 1.0})
    site = grid.sites[101]
    strategy = strategy_of(METHOD, weight_of=federated.tokens_squared_per_step)
    said = []

    def one_round(refuse=False):
        messages = strategy.configure_train(0, None, ConfigRecord(), grid)
        replies = list(grid.send_and_receive(messages))
        if refuse:
            replies = [one for one in replies if one.metadata.src_node_id != 101]
        strategy.aggregate_train(0, replies)
        said.append(dict(site._state["jaxcomp.said.metrics"]))

    one_round()
    one_round(refuse=True)
    grid.sites[101] = site = grid.begin(101)  # It was killed in between.
    one_round(refuse=True)
    one_round()
    one_round()
    assert [one["steps"] for one in said] == [STEPS, STEPS, 2 * STEPS, 3 * STEPS, STEPS]
    assert [one["tokens"] for one in said] == [8 * one["steps"] for one in said]
    assert {one["loss"] for one in said} == {1.0}


STREAMING = federated.streaming_diloco(
    jaxcomp.Link(jaxcomp.top_k(fraction=0.25), jaxcomp.Residual()),
    loss,
    fragments=2,
    delay=1,
    mix=0.25,
    inner=optax.adam(1e-2),
)


def streamed_data(number, taken):
    """The batches of the simulation from any step on, which may be within a round."""
    rounds = [data([number], taken // STEPS + more) for more in range(2)]
    both = jax.tree.map(lambda *x: np.concatenate([one[0] for one in x]), *rounds)
    return jax.tree.map(lambda x: x[taken % STEPS :][:STEPS], both)


@pytest.mark.parametrize("down", [None, pytest.param(jaxcomp.qsgd_inf(8), marks=pytest.mark.full)])
def test_fragments_take_turns_and_steps_go_on_beside_the_exchange(down, tmp_path):
    """The simulation's bits, through a killed site, whose steps of the delay are taken again."""
    method = dataclasses.replace(
        STREAMING, down=None if down is None else jaxcomp.Link(down, jaxcomp.Residual())
    )
    sim = federated.Simulation(method, params(), CLIENTS, data)
    sim.run(5)
    grid = SiteGrid(tmp_path, method, streamed_data)
    strategy = strategy_of(method, checkpoint=tmp_path / "server")
    strategy.start(grid, num_rounds=3)
    grid.sites[101] = grid.begin(101)
    last = strategy.reports[-1]
    strategy = strategy_of(method, checkpoint=tmp_path / "server")
    strategy.restore(tmp_path / "server")
    strategy.start(grid, num_rounds=2)
    jax.tree.map(np.testing.assert_array_equal, strategy.params, sim.params)
    assert {site.taken for site in grid.sites.values()} == {5 * STEPS - 1}
    # After the round of the small fragment a client gets no other.
    assert last.down < 0.1 * 4 * CLIENTS * params()["w"].size


def test_the_delay_is_taken_after_the_answer_is_sent(tmp_path):
    """In the thread that serves, so that the user's mesh, data and settings are those of others."""
    taken, threads = [], set()

    def noted(number, at):
        threads.add(threading.get_ident())
        return streamed_data(number, at)

    grid, strategy = SiteGrid(tmp_path, STREAMING, noted), strategy_of(STREAMING)
    strategy.start(grid, num_rounds=1)
    site = grid.sites[100]
    taken.append(site.taken)
    site._go_on()
    taken.append(site.taken)
    site._go_on()  # Nothing is left.
    assert taken == [STEPS - 1, STEPS]
    assert site.taken == STEPS
    strategy.start(grid, num_rounds=1)
    assert site.taken == 2 * STEPS - 1
    assert threads == {threading.get_ident()}
    sim = federated.Simulation(STREAMING, params(), CLIENTS, data)
    sim.run(2)
    jax.tree.map(np.testing.assert_array_equal, strategy.params, sim.params)


def test_an_error_in_the_delay_is_logged_and_its_steps_are_taken_in_the_next_round(
    tmp_path, caplog
):
    broken = []

    def data_of(number, at):
        if broken:
            raise OSError("the disk is away")
        return streamed_data(number, at)

    grid, strategy = SiteGrid(tmp_path, STREAMING, data_of), strategy_of(STREAMING)
    strategy.start(grid, num_rounds=1)
    broken.append(True)
    grid.sites[100]._go_on()
    assert "steps of the delay failed: OSError: the disk is away" in caplog.text
    broken.clear()
    strategy.start(grid, num_rounds=1)
    assert strategy.refused == {}
    sim = federated.Simulation(STREAMING, params(), CLIENTS, data)
    sim.run(2)
    jax.tree.map(np.testing.assert_array_equal, strategy.params, sim.params)


def test_an_app_behind_compress_mod_cannot_stream():
    with pytest.raises(ValueError, match="`method` must have no fragments, delay or mix"):
        flower.compress_mod(STREAMING, params())


@pytest.mark.full
def test_a_site_of_several_devices_trains_as_one_of_one_device(tmp_path):
    mesh = jax.make_mesh((2, 2), ("batch", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placed = flower.Placed(mesh, {"w": P(None, "model"), "b": P("model")}, P("batch"))
    for of, given in ((METHOD, own_data), (STREAMING, streamed_data)):
        method, found = dataclasses.replace(of, up=jaxcomp.Policy(None)), []
        for name, where in (("one", None), ("four", placed)):
            strategy, folder = strategy_of(method), tmp_path / f"{name}{of.fragments}"
            strategy.start(SiteGrid(folder, method, given, placed=where), num_rounds=3)
            found.append(strategy.params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), *found)


def test_the_page_trains(tmp_path, monkeypatch):
    """The blocks of `sites.md`: a method, the process of a site, and the server's app."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sites.md").read_text(), re.DOTALL)
    names = {}
    monkeypatch.setattr(flower.Site, "serve", lambda site: None)
    for block in blocks[:2]:
        exec(block.replace("/var/lib", str(tmp_path)), names)

    def app():
        def answered(message, context):
            del context
            answer = names["site"].answer(packed(message.content))
            return Message(unpacked(answer), reply_to=message)

        return answered

    names["grid"] = PushedGrid({100: app})
    server = blocks[2].replace("/var/lib", str(tmp_path)).replace("1000", "2")
    exec(server.replace("messages=3", "messages=1"), names)
    strategy = names["strategy"]
    assert [report.accepted for report in strategy.reports] == [1, 1]
    assert names["site"].taken == 40
    assert (tmp_path / "server" / "checkpoint").is_dir()


class PushedGrid(Grid):
    """A grid whose messages are pushed, and whose answers are pulled."""

    def push_messages(self, messages):
        self._answers = {}
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(number)
            (self._answers[str(number)],) = self.send_and_receive([message])
        return list(self._answers)

    def pull_messages(self, message_ids):
        return [self._answers[one] for one in message_ids]


@pytest.fixture
def served(tmp_path):
    """A site that answers in a thread, until the test ends."""
    ended, threads = threading.Event(), []

    def begin(answer):
        thread = threading.Thread(
            target=courier.serve, args=(tmp_path, answer, ended.is_set), daemon=True
        )
        threads.append(thread)
        thread.start()

    yield tmp_path, begin
    ended.set()
    for thread in threads:
        with contextlib.suppress(courier.SiteError):  # It may have seen the end by itself.
            courier.ask(tmp_path, b"", 0.5)
        thread.join(5)
        assert not thread.is_alive()


def test_the_app_hands_messages_to_the_site_and_waits_for_one_that_is_not_up(served):
    folder, begin = served
    found = []

    def late():
        time.sleep(0.5)
        begin(lambda content: content)

    threading.Thread(target=late, daemon=True).start()
    sent = RecordDict({"numbers": ConfigRecord({"a": 1, "b": b"\x00\xff", "c": [0.5, 2.0]})})
    context = Context(1, 1, {"site": str(folder)}, RecordDict(), {})
    message = Message(sent, dst_node_id=1, message_type="train")
    message.metadata.__dict__["_message_id"] = "one"
    found = site_app(message, context).content
    assert dict(found["numbers"]) == dict(sent["numbers"])
    assert (folder / "address").stat().st_mode & 0o077 == 0


def test_what_a_site_cannot_do_is_told_and_it_stays_up(served):
    folder, begin = served

    def answer(content):
        if content == b"bad":
            raise ValueError("`content` must be good")
        return content

    begin(answer)
    with pytest.raises(courier.SiteError, match="`content` must be good"):
        courier.ask(folder, b"bad", 10)
    assert courier.ask(folder, b"good", 10) == b"good"


def test_a_site_that_is_never_up_is_named(tmp_path):
    with pytest.raises(courier.SiteError, match=r"no process of the site in .*serve\(\)"):
        courier.ask(tmp_path, b"", 0.3)


def test_a_node_without_a_site_is_named():
    message = Message(RecordDict(), dst_node_id=1, message_type="train")
    message.metadata.__dict__["_message_id"] = "one"
    with pytest.raises(ValueError, match="`--node-config` of this SuperNode must have the folder"):
        site_app(message, Context(1, 1, {}, RecordDict(), {}))


def test_a_strangers_connection_changes_nothing(served):
    folder, begin = served
    begin(lambda content: content)
    assert courier.ask(folder, b"one", 10) == b"one"
    port = json.loads((folder / "address").read_text())["port"]
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
    assert courier.ask(folder, b"two", 10) == b"two"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"data": 3}, "`data`"),
        ({"folder": 3}, "`folder`"),
        ({"metrics": 3}, "`metrics`"),
        ({"placed": 3}, "`placed`"),
        ({"method": 3}, "`method`"),
    ],
)
def test_wrong_arguments_of_a_site(given, says, tmp_path):
    given = {"method": METHOD, "like": params(), "data": own_data, "folder": tmp_path, **given}
    with pytest.raises(ValueError, match=says):
        flower.Site(given.pop("method"), given.pop("like"), given.pop("data"), **given)
