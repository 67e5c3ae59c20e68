"""Means, memory and messages are, bit for bit, those that `golden/digests` has.

A digest is of content, not of structure: of an array in a state it holds the name of its field and
a hash of its bytes, so that a state may be laid out anew without another number. Where the numbers
change on purpose, `JAXCOMP_WRITE_GOLDEN=1 make test-all ARGS="-k test_digests"` records them, and
the commit says which changed and why.

They are those of one JAX and of one kind of processor, since matrix products and long sums depend
on both. Elsewhere, record them before a change, and compare after it.
"""

import collections
import hashlib
import json
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import clients, nodes, rounds, sharding
from helpers.nodes import identity  # noqa: F401
from helpers.paths import TESTS
from helpers.suite import label

import jaxcomp
from jaxcomp import federated, graphs

WRITE = bool(os.environ.get("JAXCOMP_WRITE_GOLDEN"))
PATH = TESTS / "golden" / "digests"


def machine() -> dict[str, str]:
    """What the bits depend on."""
    about = pathlib.Path("/proc/cpuinfo")
    flags = re.search(r"^flags\s*: (.*)$", about.read_text(), re.M) if about.exists() else None
    return {"jax": jax.__version__, "processor": hash_of(flags[1].encode()) if flags else "unknown"}


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def recorded() -> dict[str, str]:
    return json.loads((PATH / "machine.json").read_text())


pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not WRITE and machine() != recorded(), reason=f"bits of {recorded()}"),
    pytest.mark.filterwarnings("ignore:.*is biased.*:UserWarning"),
]
AXIS, WORKERS, STEPS = "data", 4, 3
LIKE = {
    "w": jnp.zeros((24, 64)),
    "v": jnp.zeros((20, 50)),
    "b": jnp.zeros(300),
    "n": jnp.zeros((16, 64), jnp.bfloat16),
}
"""Two leaves that share a batch, a dense one, and one of another dtype."""


def draw(like, seed, workers=WORKERS):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal((STEPS, workers, *x.shape)), x.dtype), like
    )


FOUR, SIGN = jaxcomp.qsgd_inf(bits=4), jaxcomp.sign()
TOP, MORE = jaxcomp.top_k(fraction=0.05), jaxcomp.top_k(fraction=0.2)
FEEDBACKS = {
    "none": None,
    "residual": jaxcomp.Residual(),
    "decayed residual": jaxcomp.Residual(decay=0.9),
    "narrow residual": jaxcomp.Residual(dtype="bfloat16"),
    "residual of bytes": jaxcomp.Residual(dtype="int8"),
    "shift": jaxcomp.Shift(0.3),
    "momentum": jaxcomp.MomentumCorrection(0.9),
    "aggregated": jaxcomp.Aggregated(jaxcomp.Residual()),
}
GATES = {
    "always": None,
    "every": jaxcomp.gates.Every(2),
    "bernoulli": jaxcomp.gates.Bernoulli(0.5),
    "censored": jaxcomp.gates.Censored(0.8),
}


def links():
    """Reducers of a link with every feedback that they take."""
    for name, feedback in FEEDBACKS.items():
        codec = {"momentum": TOP, "shift": FOUR}.get(name, SIGN)
        link = jaxcomp.Link(codec, feedback) if feedback else jaxcomp.Link(FOUR)
        yield f"gather, {name}", jaxcomp.Gather(link)
        if name != "aggregated":
            yield f"two shots, {name}", jaxcomp.TwoShot(link)
        if name in ("residual", "shift"):
            yield f"two shots, both {name}", jaxcomp.TwoShot(link, link)
        if name in ("none", "residual"):
            yield f"hierarchy, {name}", jaxcomp.Hierarchical(jaxcomp.Dense(), link)
            yield f"chosen, {name}", link
    sampled = jaxcomp.random_k(fraction=0.1)
    yield "summed", jaxcomp.Psum(sampled)
    yield (
        "summed, residual",
        jaxcomp.Psum(
            jaxcomp.Link(jaxcomp.random_k(fraction=0.1, unbiased=False), jaxcomp.Residual())
        ),
    )
    yield "summed codes", jaxcomp.Psum(jaxcomp.thc(bucket_size=512))
    yield "votes", jaxcomp.Vote()
    yield "power iteration", jaxcomp.PowerIteration(rank=2)
    residual = jaxcomp.Link(SIGN, jaxcomp.Residual())
    yield "robust means", jaxcomp.Robust(residual, jaxcomp.aggregates.Mean())
    yield "medians", jaxcomp.Robust(FOUR, jaxcomp.aggregates.CoordinateMedian())
    yield "credible", jaxcomp.Robust(FOUR, jaxcomp.aggregates.Credible())
    phases = [
        (0, jaxcomp.Link(TOP, jaxcomp.Residual())),
        (2, jaxcomp.Link(MORE, jaxcomp.Residual())),
    ]
    yield "phases", jaxcomp.ReducerSchedule(tuple(phases))
    yield "agreed levels", jaxcomp.Gather(jaxcomp.alq(bits=3))
    yield (
        "stateful codec",
        jaxcomp.Gather(jaxcomp.Link(jaxcomp.sidco(fraction=0.05), jaxcomp.Residual())),
    )


FORGETS = ("none", "summed", "summed codes", "votes", "medians", "credible", "agreed levels")


def gated():
    """With the gates that a reducer takes: one that forgets cannot wait, others wait and censor."""
    for name, reducer in links():
        when = ["always", "bernoulli", "every", "censored"]
        if name.startswith(("hierarchy", "phases")):
            when = ["always"]
        elif name.endswith(FORGETS):
            when = ["always", "bernoulli"]
        elif name == "two shots, shift":
            when = ["always", "censored"]  # Its devices do not know the other slices' mirror.
        elif not name.endswith("shift"):
            when.remove("censored")
        axis = ("slow", "fast") if name.startswith("hierarchy") else AXIS
        for one in when:
            yield f"{name}; {one}", (reducer, axis, {"gate": GATES[one]} if GATES[one] else {})


MEANS = dict(gated())
EVERYWHERE = jaxcomp.Policy(SIGN, min_size=0, min_ndim=0)
LOCAL = {
    "constant period": {"every": 2},
    "adaptive period": {"every": jaxcomp.gates.AdaptivePeriod(2, warmup=1)},
    "fragments": {"every": 4, "fragments": 2, "delay": 1, "mix": 0.5},
    "compressed both ways": {
        "every": 2,
        "reducer": jaxcomp.TwoShot(jaxcomp.Link(EVERYWHERE, jaxcomp.Residual()), rounds.EVERYTHING),
        "outer": optax.sgd(0.7, 0.9, nesterov=True),
    },
}
GOSSIP = {
    "differences": (jaxcomp.Gossip(jaxcomp.Link(EVERYWHERE, jaxcomp.Shift())), {"mixing": 0.3}),
    "models": (jaxcomp.Gossip(rounds.EVERYTHING), {}),
    "changing graph": (
        jaxcomp.Gossip(jaxcomp.Link(EVERYWHERE, jaxcomp.Residual()), graphs.OnePeer()),
        {"mixing": 0.3},
    ),
    "tracking": (
        jaxcomp.Gossip(jaxcomp.Link(rounds.EVERYTHING, jaxcomp.Shift(0.3))),
        {"tracking": True},
    ),
}
FEDERATED = {
    "residuals both ways": clients.METHOD,
    "shift": federated.Method(
        clients.WORK,
        jaxcomp.Link(jaxcomp.Policy(FOUR, min_size=100), jaxcomp.Shift(0.3)),
        mean="all",
        sampling=federated.Independently(0.5),
    ),
    "alone": federated.Method(clients.WORK, clients.POLICY),
}


def sha(array) -> str:
    data = np.ascontiguousarray(array)
    return hash_of(str(data.dtype).encode() + data.tobytes())


def role(path) -> str:
    names = [str(key.name) for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    return next((name for name in reversed(names) if name != "tree"), "")


def contents(tree) -> list[str]:
    """Of all arrays with elements, in an order that does not depend on the tree."""
    found = [
        f"{role(path)} {sha(leaf)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if np.size(leaf)
    ]
    return sorted(found)


def of_mean(case):
    reducer, axis, settings = case
    tx = jaxcomp.compressed_mean(reducer, axis, key=5, **settings)
    names, shape = ((axis,), (WORKERS,)) if axis == AXIS else (axis, (2, 2))

    def everyone(function):
        for name in reversed(names):
            function = jax.vmap(function, axis_name=name)
        return function

    @jax.jit
    def run(grads):
        def step(carry, grads):
            params, state = carry
            mean, state = everyone(tx.update)(grads, state, params)
            return (mean, state), mean

        state = everyone(lambda _: tx.init(LIKE))(jnp.zeros(shape))
        first = jax.tree.map(lambda x: jnp.zeros((*shape, *x.shape), x.dtype), LIKE)
        return jax.lax.scan(step, (first, state), grads)

    grads = jax.tree.map(lambda x: x.reshape(STEPS, *shape, *x.shape[2:]), draw(LIKE, 0))
    (_, state), means = run(grads)
    return {"mean": contents(means), "state": contents(state)}


def of_local(settings):
    settings = {
        "reducer": jaxcomp.Gather(jaxcomp.Link(EVERYWHERE, jaxcomp.Residual())),
        "outer": None,
        **settings,
    }
    outer = settings.pop("outer")
    tx = jaxcomp.local_updates(optax.sgd(0.1, 0.9), outer, AXIS, key=5, **settings)
    params, own, _, state = rounds.trained(tx, 7, rounds.FOUR, data=rounds.EXACT)
    return {"mean": contents((params, own)), "state": contents(last(state))}


def of_gossip(case):
    reducer, settings = case
    tx = jaxcomp.gossip(optax.sgd(0.1, 0.9), reducer, AXIS, key=5, **settings)
    _, own, _, state = rounds.trained(tx, 5, data=rounds.EXACT)
    return {"mean": contents(own), "state": contents(last(state))}


def last(states):
    return jax.tree.map(lambda x: x[-1], states)


def of_federated(method):
    sim = clients.simulation(method, messages=1_000)
    reports = sim.run(2)
    sent = [r.up for r in reports], [r.down for r in reports]
    return {"mean": contents(sim.params), "state": contents(sim.state), "bytes": [*map(list, sent)]}


def of_sharded(name):
    mesh = sharding.make_mesh(sharding.TWO)
    tx = jaxcomp.compressed_mean(sharding.REDUCERS[name], "dcn", key=5, param_specs=sharding.SPECS)
    zeros = sharding.zeros(sharding.SHAPES, mesh, sharding.SPECS)
    state, run, means = jaxcomp.init_state(tx, zeros, mesh, "dcn"), sharding.stepper(tx, mesh), []
    for seed in range(STEPS):
        grads = sharding.put(sharding.draw(sharding.SHAPES, seed), mesh, sharding.SPECS, "dcn")
        state, mean = run(state, grads)
        means.append(mean)
    return {"mean": contents(means), "state": contents(state)}


def content_of(message) -> str:
    """Of all records of a message of Flower: arrays and bytes as they travel, and settings."""
    found = b""
    for name, record in sorted(message.content.items()):
        for key, value in sorted(record.items()):
            data = getattr(value, "data", None)
            found += f"{name} {key} ".encode()
            found += data if isinstance(data, bytes) else repr(value).encode()
    return hash_of(found)


def of_flower(method):
    """What the nodes of two rounds are told and answer."""
    grid, strategy, sent = nodes.grid_of(method), nodes.strategy_of(method, key=3), []
    strategy._run, strategy._since = (
        bytes(8),
        1,
    )  # Random, and the time; messages are bound to them.
    send = grid.send_and_receive

    def spoken(messages, **settings):
        sent.extend(map(content_of, messages))
        replies = send(messages, **settings)
        sent.extend(map(content_of, replies))
        return replies

    grid.send_and_receive = spoken
    strategy.start(grid, num_rounds=2)
    found = {"mean": contents(strategy.params), "state": contents(strategy.state)}
    return {**found, "messages": sent}


KINDS = {
    "mean": (of_mean, MEANS),
    "local": (of_local, LOCAL),
    "gossip": (of_gossip, GOSSIP),
    "federated": (of_federated, FEDERATED),
    "flower": (of_flower, {"both ways": nodes.method(), "up": nodes.method(down=None)}),
    "sharded": (of_sharded, {name: name for name in sharding.REDUCERS}),
}
CASES = [(kind, name) for kind, (_, cases) in KINDS.items() for name in cases]


@pytest.mark.parametrize(("kind", "name"), CASES, ids=label)
def test_the_bits_are_those_of_the_golden_digests(kind, name):
    found_by, cases = KINDS[kind]
    found = found_by(cases[name])
    assert len(found["mean"]) > 0
    if WRITE:
        (PATH / "machine.json").write_text(json.dumps(machine(), indent=1) + "\n")
        (PATH / f"{kind}, {name}.json").write_text(json.dumps(found, indent=1) + "\n")
    want = json.loads((PATH / f"{kind}, {name}.json").read_text())
    lost = collections.Counter(want["state"]) - collections.Counter(found["state"])
    new = collections.Counter(found["state"]) - collections.Counter(want["state"])
    assert found["mean"] == want["mean"]
    assert not lost, (sorted(lost), sorted(new))
    assert found == want
