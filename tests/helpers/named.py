"""Methods by their names in the literature, each beside itself in float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp
from jaxcomp import federated
from jaxcomp.federated import server

CLIENTS, STEPS, ROUNDS, RATE = 5, 3, 4, 0.05
ROWS, COLUMNS = 48, 8
WEIGHTS = np.arange(1.0, CLIENTS + 1)
DELAYS = np.array([0, 2, 0, 1, 0])
"""The rounds that each client of FedBuff needs."""


def loss(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def start():
    draw = np.random.default_rng(0)
    made = {"w": draw.normal(0, 0.2, (ROWS, COLUMNS)), "b": draw.normal(0, 0.2, COLUMNS)}
    return jax.tree.map(np.float32, made)


def data(numbers, round):
    """Batches of clients whose solutions differ."""
    draws = [np.random.default_rng([int(number), round]) for number in numbers]
    x = np.stack([draw.normal(size=(STEPS, 5, ROWS)) for draw in draws])
    own = [
        draw.normal(number / 4, 1, (STEPS, 5, COLUMNS))
        for number, draw in zip(numbers, draws, strict=True)
    ]
    return x.astype(np.float32), np.stack(own).astype(np.float32)


CODECS = {
    "codec": jaxcomp.Link(
        jaxcomp.Policy(jaxcomp.top_k(fraction=0.25), min_size=64), jaxcomp.Residual()
    ),
    "down": jaxcomp.Link(
        jaxcomp.Policy(jaxcomp.blockwise(bits=8), min_size=64), jaxcomp.Residual()
    ),
}
"""Compression both ways, which leaves biases dense."""


def method(name, codec=None, **given):
    settings = {
        "fedprox": {"mu": 0.5, "participants": 3},
        "fedadam": {"server_rate": 0.05, "participants": 3},
        "fedyogi": {"server_rate": 0.05, "participants": 3},
        "scaffold": {"server_rate": 0.8, "participants": 3},
        "fedbuff": {"server_rate": 0.7},
    }[name]
    make = getattr(federated, name)
    return make(codec, loss, learning_rate=RATE, **{**settings, **given})


NAMES = ("fedprox", "fedadam", "fedyogi", "scaffold", "fedbuff")


def params_of(name, params):
    return federated.add_control(params) if name == "scaffold" else params


def faults_of(name):
    return federated.Faults(longest=2) if name == "fedbuff" else federated.Faults(lost=0.2)


def delays(numbers, round):
    return DELAYS[numbers] if round < ROUNDS else np.zeros(len(numbers), int)


def simulated(name, rounds=ROUNDS, params=None, given=None, **settings):
    params = start() if params is None else params
    settings = {"faults": faults_of(name), "weights": WEIGHTS, **settings}
    if name == "fedbuff":
        settings["delays"] = delays
    given = method(name) if given is None else given
    sim = federated.Simulation(given, params_of(name, params), CLIENTS, data, **settings)
    sim.run(rounds)
    return sim


def arrivals(name):
    """The clients of each round whose messages are accepted, with the round in which they began."""
    if name == "fedbuff":
        ends = [[] for _ in range(ROUNDS)]
        for client, delay in enumerate(DELAYS):
            for began in range(0, ROUNDS - delay, delay + 1):
                ends[began + delay].append((began, client))
        return [sorted(found) for found in ends]
    found, given = [], method(name)
    for number in range(ROUNDS):
        key = server.round_key(jnp.zeros(2, jnp.uint32), number)
        cohort = given.sampling.cohort(key, CLIENTS)
        arrives, _ = faults_of(name).draw(key, cohort, 1)
        found.append([(number, int(client)) for client in cohort[arrives]])
    return found


def each(f, *trees):
    return {name: f(*(tree[name] for tree in trees)) for name in trees[0]}


def local(params, client, began, mu=0.0, add=None):
    """A client's parameters after steps along `g + μ (θ − φ) + add`."""
    begin = now = each(np.float64, params)
    add = each(np.zeros_like, begin) if add is None else add
    x, y = (part[0].astype(np.float64) for part in data([client], began))
    for step in range(STEPS):
        error = 2 * (x[step] @ now["w"] + now["b"] - y[step]) / y[step].size
        g = {"w": x[step].T @ error, "b": error.sum(0)}
        now = each(lambda p, g, q, a: p - RATE * (g + mu * (p - q) + a), now, g, begin, add)
    return now


def mean(trees, weights, divisor):
    return each(lambda *xs: sum(w * x for w, x in zip(weights, xs, strict=True)) / divisor, *trees)


def moves(at, found, **given):
    """The differences `θᵢ − φᵢ` of the clients of a round, and their weights."""
    moved = [each(np.subtract, local(at[b], c, b, **given), at[b]) for b, c in found]
    return moved, [WEIGHTS[client] for _, client in found]


def fedprox(mu=0.5):
    at = [each(np.float64, start())]
    for found in arrivals("fedprox"):
        moved, weights = moves(at, found, mu=mu)
        at.append(each(np.add, at[-1], mean(moved, weights, sum(weights))))
    return at[-1]


def adaptive(name, rate=0.05, b1=0.9, b2=0.99, tau=1e-3):
    """FedAdam and FedYogi by their authors' algorithm 2."""
    at = [each(np.float64, start())]
    m, v = each(np.zeros_like, at[0]), each(lambda x: np.full_like(x, tau**2), at[0])
    for found in arrivals(name):
        moved, weights = moves(at, found)
        delta = mean(moved, weights, sum(weights))
        m = each(lambda m, d: b1 * m + (1 - b1) * d, m, delta)
        if name == "fedadam":
            v = each(lambda v, d: b2 * v + (1 - b2) * d**2, v, delta)
        else:
            v = each(lambda v, d: v - (1 - b2) * d**2 * np.sign(v - d**2), v, delta)
        at.append(each(lambda x, m, v: x + rate * m / (np.sqrt(v) + tau), at[-1], m, v))
    return at[-1]


def scaffold(rate=0.8):
    """SCAFFOLD with option II, as its authors write it; the parameters and all variates."""
    at = [each(np.float64, start())]
    zero = each(np.zeros_like, at[0])
    c, own = zero, [zero] * CLIENTS
    for found in arrivals("scaffold"):
        x, changes, moved = at[-1], [], []
        for _, client in found:
            ci = own[client]
            y = local(x, client, len(at) - 1, add=each(np.subtract, c, ci))
            new = each(lambda i, c, x, y: i - c + (x - y) / (STEPS * RATE), ci, c, x, y)
            changes.append(each(np.subtract, new, ci))
            moved.append(each(np.subtract, y, x))
            own[client] = new
        weights = [WEIGHTS[client] for _, client in found]
        step = mean(moved, weights, sum(weights))
        at.append(each(lambda x, d: x + rate * d, x, step))
        c = each(np.add, c, mean(changes, weights, WEIGHTS.sum()))
    return at[-1], c, own


def fedbuff(rate=0.7):
    at = [each(np.float64, start())]
    for number, found in enumerate(arrivals("fedbuff")):
        moved, weights = moves(at, found)
        weights = [w * (1 + number - b) ** -0.5 for w, (b, _) in zip(weights, found, strict=True)]
        step = mean(moved, weights, len(found) * WEIGHTS.mean())
        at.append(each(lambda x, d: x + rate * d, at[-1], step))
    return at[-1]


def reference(name):
    """The parameters after all rounds, in float64."""
    if name in ("fedadam", "fedyogi"):
        return adaptive(name)
    found = {"fedprox": fedprox, "scaffold": scaffold, "fedbuff": fedbuff}[name]()
    return found[0] if name == "scaffold" else found
