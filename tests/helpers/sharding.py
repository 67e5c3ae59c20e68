"""Models that are sharded over some axes of a mesh, for the tests of means over another."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxcomp
from jaxcomp.numerics import noise
from jaxcomp.wire import hlo

TWO, THREE = {"dcn": 2, "fsdp": 4}, {"dcn": 2, "fsdp": 2, "tp": 2}
SPECS = {"kernel": P("fsdp"), "table": P(None, "fsdp"), "bias": P("fsdp")}
SHAPES = {"kernel": (64, 96), "table": (40, 128), "bias": (96,)}
# Replicated over tp or over all: cut further where something divides, and filled up elsewhere.
_MIXED = {
    "kernel": ((64, 96), P("fsdp", "tp"), (32, 48)),
    "wide": ((32, 128), P(None, ("tp", "fsdp")), (32, 32)),
    "half": ((64, 80), P("fsdp"), (16, 80)),
    "head": ((64, 64), None, (16, 64)),
    "odd": ((46, 57), P("fsdp"), (23, 29)),
    "prime": ((47, 43), P(), (12, 43)),
    "scale": ((), P(), ()),
    "empty": ((0, 3), P(), (0, 3)),
}
MIXED_SHAPES, MIXED, MIXED_LOCAL = (
    {name: given[number] for name, given in _MIXED.items()} for number in range(3)
)
QSGD = jaxcomp.qsgd_inf(bits=8, bucket_size=128)
EF_SIGN = jaxcomp.Link(jaxcomp.sign(bucket_size=256), jaxcomp.Residual())
REDUCERS = {
    "dense": jaxcomp.Dense(),
    "gather": jaxcomp.Gather(QSGD),
    "two shot": jaxcomp.TwoShot(QSGD),
    "two shot, both ways": jaxcomp.TwoShot(EF_SIGN, EF_SIGN),
}

QUICK = {"xla_backend_optimization_level": 0}
"""What machine code comes of a program does not matter to what it sends."""


def make_mesh(sizes):
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def put(tree, mesh, specs, *before):
    def one(x, spec):
        return jax.device_put(x, NamedSharding(mesh, P(*before, *(spec or P()))))

    return {name: one(x, specs[name]) for name, x in tree.items()}


def draw(shapes, seed=0, workers=2):
    rng = np.random.default_rng(seed)
    return {k: rng.standard_normal((workers, *s)).astype(np.float32) for k, s in shapes.items()}


def zeros(shapes, mesh, specs):
    return put({k: np.zeros(s, np.float32) for k, s in shapes.items()}, mesh, specs)


def homes(tree):
    return [x.sharding for x in jax.tree.leaves(tree)]


def stepper(tx, mesh, **settings):
    """Gradients come with a leading axis of workers."""

    def step(state, grads):
        mean, state = tx.update(jax.tree.map(lambda x: x[0], grads), state)
        return state, mean

    return jaxcomp.data_parallel(step, mesh, "dcn", **settings)


def local_likes(shapes, specs, sizes):
    def one(shape, spec):
        over = [(e if isinstance(e, tuple) else (e,)) if e else () for e in spec]
        over += [()] * (len(shape) - len(over))
        local = [n // math.prod(sizes[a] for a in e) for n, e in zip(shape, over, strict=True)]
        return jax.ShapeDtypeStruct(tuple(local), jnp.float32)

    return {name: one(shape, specs[name]) for name, shape in shapes.items()}


def groups_of(line):
    """The groups of devices among which a collective moves data."""
    found = re.search(r"replica_groups=\{(\{.*?\})\}", line)
    pairs = re.search(r"source_target_pairs=\{(\{.*?\})\}", line)
    if found or pairs:
        text = (found or pairs)[1]
        return [[int(n) for n in part.split(",")] for part in re.findall(r"\{([\d,]+)\}", text)]
    found = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line)
    if found:  # JAX 0.11 writes the mesh, and the axes along which a group lies.
        sizes = {name: int(size) for name, size in re.findall(r"'?([\w.]+)'?=(\d+)", found[1])}
        along = [list(sizes).index(name) for name in re.findall(r"[\w.]+", found[2])]
        devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        last = np.moveaxis(devices, along, range(-len(along), 0))
        return last.reshape(-1, math.prod(last.shape[-len(along) :])).tolist()
    found = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    shape, dims, order = ([int(n) for n in (part or "").split(",") if n] for part in found.groups())
    devices = np.arange(math.prod(dims)).reshape(dims)
    return (devices.transpose(order) if order else devices).reshape(shape).tolist()


def crossings(compiled, slow=2):
    """Bytes a device sends over dcn, and the other collectives: their name, dtype and size."""
    text = compiled.as_text()
    header, *lines = text.splitlines()
    total, others, each = 0, [], jax.device_count() // slow
    for line in lines:
        moved = hlo.collective_bytes(f"{header}\n{line}")
        if not moved:
            continue
        if any(len({device // each for device in group}) > 1 for group in groups_of(line)):
            assert all(len(group) == slow for group in groups_of(line)), line  # {0, 4}, {1, 5}, …
            total += sum(moved.values())
        else:
            others.append((*moved, *re.search(r" = \(?(\w+)\[([\d,]*)\]", line).groups()))
    return total, others


def simulator(reducer, workers=2):
    """What one shard's devices come to on their own: a model that is not sharded, under vmap."""
    tx = jaxcomp.compressed_mean(reducer, "dcn")
    each = functools.partial(jax.vmap, axis_name="dcn", axis_size=workers)
    update = jax.jit(each(tx.update))

    def run(grads, shard):
        state = each(lambda g: tx.init(g))(grads[0])
        key = noise.fold(noise.raw(0), shard)
        state = state._replace(key=jnp.broadcast_to(key, (workers, 2)))
        for one in grads:
            mean, state = update(one, state)
        return jax.tree.map(lambda x: np.asarray(x[0]), mean), state

    return run
