"""Bytes by axis of a mesh, and in loops."""

import copy
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

import jaxcomp
from jaxcomp.wire import crossed

LAYERS, ROW = 6, 64 * 4
AXES = {"data": 2, "fsdp": 4}
QUICK = {"xla_backend_optimization_level": 0}


@pytest.fixture(scope="module")
def grid():
    return jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 2)


def compiled(f, mesh, *args):
    mapped = jax.shard_map(
        f, mesh=mesh, in_specs=P(("data", "fsdp")), out_specs=P(), check_vma=False
    )
    return jax.jit(mapped).lower(*args).compile(QUICK)


def ring_of(size, n):
    return 2 * (n - 1) * size // n


def test_a_loop_counts_each_of_its_iterations(grid):
    """Loops within loops multiply; a condition that sends runs once more than its body."""

    def f(x):
        def inner(i, x):
            return lax.psum(x, "data") * 0.1

        x = lax.fori_loop(0, 3, lambda i, x: lax.fori_loop(0, 5, inner, x), x)
        x, _ = lax.scan(lambda x, _: (lax.psum(x, "fsdp") * 0.1, None), x, None, length=LAYERS)
        return lax.psum(x, ("data", "fsdp"))

    program = compiled(f, grid, jnp.ones((8, 64)))
    sent = jaxcomp.collective_bytes(program, grid)
    assert sent == {
        "data": 15 * ring_of(ROW, 2),
        "fsdp": LAYERS * ring_of(ROW, 4),
        ("data", "fsdp"): ring_of(ROW, 8),
    }
    by_kind = jaxcomp.collective_bytes(program)
    assert by_kind == {"all-reduce": sum(sent.values())}
    assert not sent.at_least
    assert not by_kind.at_least
    assert repr(by_kind) == repr(dict(by_kind))


def test_a_loop_of_unknown_length_counts_once_and_says_so(grid):
    def f(x):
        def rotate(x):
            return lax.ppermute(x, "fsdp", [(0, 1), (1, 2), (2, 3), (3, 0)])

        return lax.while_loop(lambda x: x.sum() < 7, rotate, x)

    program = compiled(f, grid, jnp.ones((8, 64)))
    for mesh, key in ((None, "collective-permute"), (grid, "fsdp")):
        sent = jaxcomp.collective_bytes(program, mesh)
        assert sent == {key: ROW}
        assert sent.at_least
        assert repr(sent) == f"at least {{'{key}': 256}}"
        assert copy.copy(sent).at_least

    def quiet(x):
        return lax.psum(lax.while_loop(lambda x: x.sum() < 7, lambda x: x + 1, x), "data")

    assert not jaxcomp.collective_bytes(compiled(quiet, grid, jnp.ones((8, 64)))).at_least


def test_dense_gradients_of_scanned_layers(grid):
    """Of automatic axes: HLO names its groups by the axes of another mesh."""

    def loss(w, x):
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
        return (x**2).mean()

    w = jax.ShapeDtypeStruct(
        (LAYERS, 64, 64), jnp.float32, sharding=NamedSharding(grid, P(None, "fsdp"))
    )
    x = jax.ShapeDtypeStruct(
        (16, 64), jnp.float32, sharding=NamedSharding(grid, P(("data", "fsdp")))
    )
    step = jax.jit(jax.grad(loss), out_shardings=w.sharding).lower(w, x).compile(QUICK)
    sent = jaxcomp.collective_bytes(step, grid)
    own = 64 * 64  # Bytes of a device's part of a layer.
    assert sent["data"] == LAYERS * ring_of(own, 2)
    assert set(sent) <= {"data", "fsdp", ("data", "fsdp")}
    assert sum(sent.values()) == sum(jaxcomp.collective_bytes(step).values())
    text = step.as_text()
    assert jaxcomp.collective_bytes(text, AXES) == sent
    assert jaxcomp.collective_bytes(text, AbstractMesh((2, 4), ("data", "fsdp"))) == sent


def test_devices_are_found_in_a_mesh_of_another_order(grid):
    """Rows of four devices of the program's mesh are columns and rows of the other."""
    order = np.arange(8).reshape(4, 2).T
    other = Mesh(grid.devices.reshape(-1)[order], ("data", "fsdp"))
    program = compiled(lambda x: lax.psum(x, "fsdp"), other, jnp.ones((8, 64)))
    size = ring_of(ROW, 4)
    assert jaxcomp.collective_bytes(program, other) == {"fsdp": size}
    assert jaxcomp.collective_bytes(program, grid) == {("data", "fsdp"): size}
    assert jaxcomp.collective_bytes(program, {"a": 1, **AXES}) == {"fsdp": size}


HEADER = "HloModule m, num_partitions=8\n"
GATHER = "%g = f32[8,2]{1,0} all-gather(%x), channel_id=1, replica_groups=GROUPS, dimensions={0}"


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("[2,4]<=[8]", "fsdp", 48),
        ("[4,2]<=[2,4]T(1,0)", "data", 32),
        ("[4,2]<=[8]", "fsdp", 32),
        ("[1,8]<=[8]", ("data", "fsdp"), 56),
        ("{{0,4},{1,5},{2,6},{3,7}}", "data", 32),
        ("{{0,1,2,3},{4,5,6,7}}", "fsdp", 48),
        ("{{0,5},{1,4},{2,7},{3,6}}", ("data", "fsdp"), 32),
        ("{{0,1,2},{3,4}}", ("data", "fsdp"), 128 / 3),
        ("{}", ("data", "fsdp"), 56),
        ("mesh['a'=2,'b'=4] {'a'}", "data", 32),
        ("mesh['a'=2,'b'=4] {'b'}", "fsdp", 48),
        ("mesh['a'=2,'b'=4] {'a','b'}", ("data", "fsdp"), 56),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", "fsdp", 48),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'c'}", "data", 32),
        ("mesh['a'=8] {'a':(2)4}", "fsdp", 48),
        ("mesh['a'=8] {'a':(1)2}", "data", 32),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ("data", "fsdp"), 48),
        ("mesh['a'=2,'b'=4], device_ids=(0,4,1,5,2,6,3,7) {'b'}", ("data", "fsdp"), 48),
    ],
)
def test_groups_of_devices(groups, axes, size):
    text = HEADER + GATHER.replace("GROUPS", groups)
    assert jaxcomp.collective_bytes(text, AXES) == {axes: math.ceil(size)}


def test_each_message_of_a_permutation_crosses_its_own_axes():
    """A ring over both axes, of whose eight messages two go to another row."""
    ring = ",".join(f"{{{n},{(n + 1) % 8}}}" for n in range(8))
    line = f"%p = f32[80]{{0}} collective-permute(%x), source_target_pairs={{{ring},{{3,3}}}}"
    found = jaxcomp.collective_bytes(HEADER + line, AXES)
    share = 320 / 9
    assert found == {"fsdp": math.ceil(6 * share), ("data", "fsdp"): math.ceil(2 * share)}
    alone = line.replace(ring, "{0,0}").replace(",{3,3}", "")
    assert jaxcomp.collective_bytes(HEADER + alone, AXES) == {}


ASYNC = """HloModule m, num_partitions=8

%moved (a: f32[8]) -> f32[32] {
  ROOT %g = f32[32]{0} all-gather(%a), replica_groups=[2,4]<=[8], dimensions={0}
}

%body (a: f32[8]) -> f32[8] {
  %s = ((f32[8]), f32[32], u32[]) async-start(%a), calls=%moved
  %u = ((f32[8]), f32[32], u32[]) async-update(%s), calls=%moved
  %d = f32[32]{0} async-done(%u), calls=%moved
  %q = (f32[8]{0}, f32[8]{0}) collective-permute-start(%a), source_target_pairs={{0,4},{4,0}}
  ROOT %e = f32[8]{0} collective-permute-done(%q)
}

%goes_on (a: f32[8]) -> pred[] {
  %r = f32[8]{0} all-reduce(%a), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %w = f32[8]{0} while(%x), condition=%goes_on, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %v = f32[8]{0} while(%w), condition=%goes_on, body=%body, backend_config={"known_trip_count":{"n":"2"}}
}
"""  # noqa: E501


def test_asynchronous_operations_count_once_per_iteration():
    """Two loops that share their computations run them five times, and the condition seven."""
    permuted, gathered, reduced = 32 * 2 // 8, 3 * 32, 32
    assert jaxcomp.collective_bytes(ASYNC) == {
        "all-gather": 5 * gathered,
        "collective-permute": 5 * permuted,
        "all-reduce": 7 * reduced,
    }
    by_axis = jaxcomp.collective_bytes(ASYNC, AXES)
    assert by_axis == {"fsdp": 5 * gathered, "data": 5 * permuted + 7 * reduced}
    without = ASYNC.replace("known_trip_count", "other").replace("%goes_on,", "%none,")
    once = jaxcomp.collective_bytes(without, AXES)
    assert once == {"fsdp": 2 * gathered, "data": 2 * permuted}
    assert once.at_least


def test_an_unknown_loop_in_a_cheaper_branch_may_send_more():
    branches = """HloModule m, num_partitions=8

%in_loop (a: f32[8]) -> f32[8] {
  ROOT %r = f32[8]{0} all-reduce(%a), replica_groups=[1,8]<=[8], to_apply=%add
}

%cheap (a: f32[8]) -> f32[8] {
  ROOT %w = f32[8]{0} while(%a), condition=%in_loop, body=%in_loop
}

%dear (a: f32[8]) -> f32[8] {
  ROOT %r.1 = f32[800]{0} all-reduce(%a), replica_groups=[1,8]<=[8], to_apply=%add
}

ENTRY %main (x: f32[8]) -> f32[8] {
  ROOT %s = f32[8]{0} conditional(%i, %x, %x), branch_computations={%cheap, %dear}
}
"""
    found = jaxcomp.collective_bytes(branches, AXES)
    assert found == {("data", "fsdp"): ring_of(3200, 8)}
    assert found.at_least


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"data": 2}, r"`mesh` must have as many devices as the program, 8, got 2: {'data': 2}"),
        (("data", "fsdp"), r"`mesh` must be a mesh, or a dictionary .*, got \('data', 'fsdp'\)"),
        ({"data": "8"}, "`mesh` must be a mesh, or a dictionary"),
        ({"data": 0}, "`mesh` must be a mesh, or a dictionary"),
    ],
)
def test_a_wrong_mesh_says_so(mesh, said):
    with pytest.raises(ValueError, match=said):
        jaxcomp.collective_bytes(HEADER, mesh)


@pytest.mark.parametrize(
    "groups",
    ["[2,4]<=[16]", "{{0,1},{8,9}}", "mesh['a'=16] {'a'}", "mesh['a'=8] {'b'}", "[2,4]<=[2,4]T(0)"],
)
def test_groups_of_other_devices_are_refused(groups):
    with pytest.raises(ValueError, match=r"in which this line cannot be read: .%g = "):
        jaxcomp.collective_bytes(HEADER + GATHER.replace("GROUPS", groups), AXES)


def test_a_large_mesh_is_read_in_time():
    sizes = {"a": 16, "b": 16, "c": 16}
    read = functools.partial(crossed.groups, everyone=4096)
    layout = crossed.layout(sizes, "", 4096)
    assert layout.crossed(read("replica_groups=[256,16]<=[4096]")) == "c"
    assert layout.crossed(read("replica_groups=[256,16]<=[16,16,16]T(0,2,1)")) == "b"
    assert layout.crossed(read("replica_groups=[1,4096]<=[4096]")) == ("a", "b", "c")
