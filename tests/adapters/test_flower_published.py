"""Sites that join or return read the parameters where the server publishes them."""

import jax
import numpy as np
import pytest
from helpers.nodes import CLIENTS, STEPS, data, identity, loss, params, strategy_of  # noqa: F401

import jaxcomp
import jaxcomp_weights
from jaxcomp import federated

pytest.importorskip("flwr")
from test_flower_site import METHOD, SiteGrid

from jaxcomp.adapters import flower
from jaxcomp.adapters.flower import published


@pytest.fixture(scope="module")
def undisturbed():
    sim = federated.Simulation(METHOD, params(), CLIENTS, data)
    sim.run(3)
    return sim.params


class ReadingGrid(SiteGrid):
    """Sites that read published parameters, but for those of these nodes."""

    def __init__(self, folder, url, without=()):
        super().__init__(folder)
        plain = self.begin

        def begin(node):
            reader = None if node in without else jaxcomp_weights.Reader(url)
            site = plain(node)
            site._weights = reader
            return site

        self.begin = begin
        self.sites = {node: begin(node) for node in self.sites}


def size():
    return sum(x.nbytes for x in jax.tree.leaves(params()))


def test_sites_that_join_and_a_server_that_restarts_send_no_parameters_by_message(
    undisturbed, tmp_path
):
    url, folder = tmp_path / "weights", tmp_path / "server"
    grid = ReadingGrid(tmp_path, url)
    with jaxcomp.weights.Publisher(url) as publisher:
        strategy = strategy_of(METHOD, checkpoint=folder, weights_to=publisher)
        strategy.start(grid, num_rounds=1)
        assert strategy.down == 0
        strategy.start(grid, num_rounds=1)
        grid.sites[101] = grid.begin(101)  # It was killed, and its reader knows nothing.
    with jaxcomp.weights.Publisher(url) as publisher:
        strategy = strategy_of(METHOD, checkpoint=folder, weights_to=publisher)
        strategy.restore(folder)  # What sites have is not known after a restart.
        before = strategy.down
        strategy.start(grid, num_rounds=1)
        assert strategy.down == before
    jax.tree.map(np.testing.assert_array_equal, strategy.params, undisturbed)
    assert {site.taken for site in grid.sites.values()} == {3 * STEPS}
    reader = jaxcomp_weights.Reader(url)
    named, _ = reader.update()
    assert reader.step == 3
    np.testing.assert_array_equal(named["w"], strategy.params["w"])


def test_a_site_that_cannot_read_gets_the_parameters_by_message_in_the_next_round(tmp_path):
    url = tmp_path / "weights"
    grid = ReadingGrid(tmp_path, url, without={103})
    with jaxcomp.weights.Publisher(url) as publisher:
        strategy = strategy_of(METHOD, weights_to=publisher)
        strategy.start(grid, num_rounds=2)
    assert dict(strategy.refused) == {"behind": 1}
    assert [report.accepted for report in strategy.reports] == [CLIENTS - 1, CLIENTS]
    assert strategy.reports[0].down == 0
    assert size() <= strategy.reports[1].down <= size() * CLIENTS
    assert grid.sites[103].taken == STEPS


def test_what_cannot_be_published_is_logged_and_sent_by_message(monkeypatch, tmp_path, caplog):
    class Broken(jaxcomp.weights.Publisher):
        def publish(self, params, step):
            raise OSError("the disk is full")

    monkeypatch.setattr(published.log, "propagate", True)
    grid = ReadingGrid(tmp_path, tmp_path / "weights")
    with Broken(tmp_path / "weights") as publisher, caplog.at_level("WARNING", "flwr"):
        strategy = strategy_of(METHOD, weights_to=publisher)
        strategy.start(grid, num_rounds=1)
    assert strategy.down >= CLIENTS * size()
    assert "round 0 is not published: the disk is full" in caplog.text


def test_other_parameters_at_the_url_are_not_taken(monkeypatch, tmp_path):
    """Those of another round, of other shapes, or none: a site says that it is behind."""
    monkeypatch.setattr(published, "PATIENCE", 0.1)
    like, url = params(), tmp_path / "weights"
    reader = jaxcomp_weights.Reader(url)
    assert published.read(reader, like, 1) is None
    with jaxcomp.weights.Publisher(url) as publisher:
        sent = published.Published(publisher)
        sent.publish(like, 1)
        publisher.flush()
        jax.tree.map(np.testing.assert_array_equal, published.read(reader, like, 1), like)
        assert published.read(reader, like, 2) is None
        assert published.read(reader, {"w": like["w"]}, 1) is None
        assert published.read(reader, {**like, "b": np.zeros(33, np.float32)}, 1) is None
        sent.publish(like, 3)
        publisher.flush()
        assert published.read(reader, like, 2) is None


def test_wrong_publishers_and_readers_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`weights_to` must be a jaxcomp\.weights\.Publisher"):
        strategy_of(METHOD, weights_to=str(tmp_path))
    with pytest.raises(ValueError, match=r"`weights` must be a jaxcomp_weights\.Reader"):
        flower.Site(METHOD, params(), data, folder=tmp_path / "site", weights="url")
    codec = jaxcomp.wyner_ziv(levels=8)
    guided = federated.Method(METHOD.work, federated.Uplink(codec, federated.LastMean()))
    with (
        jaxcomp.weights.Publisher(tmp_path / "weights") as publisher,
        pytest.raises(ValueError, match="`weights_to` must be None with side information"),
    ):
        strategy_of(guided, weights_to=publisher)
