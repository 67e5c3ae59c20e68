"""Loops send beside what they compute, and change no bit of their results."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jaxcomp
from jaxcomp.collectives import pipelining

SIZE = 32
KEYS = jax.random.split(jax.random.key(0), 2)
X = jax.random.normal(KEYS[0], (4, 8, SIZE))


def net(parts, x):
    """Loops that send ahead, behind, both ways or neither, forward and in reverse."""

    def gathers(h, part):
        whole = lax.all_gather(part, "x", tiled=True)
        return jnp.tanh(h @ whole), h.sum()

    def scatters(h, part):
        h = jnp.tanh(h + part[0])
        return h, lax.psum_scatter(h.T @ h, "x", tiled=True)

    def does_both(h, part):
        whole = lax.all_gather(part, "x", tiled=True)
        return jnp.tanh(h @ whole), (lax.psum_scatter(h.T @ h, "x", tiled=True), part[0])

    def waits(h, part):
        return lax.pmean(h, "x") + part[0], None

    found = []
    for layer in (gathers, scatters, does_both, waits):
        for reverse in (False, True):
            found.append(lax.scan(layer, x, parts, reverse=reverse))
    return found


def mapped(f):
    return jax.jit(jax.vmap(f, axis_name="x"))


def ahead(f):
    """The function as it is lowered for a GPU or TPU, on every platform."""

    def run(*args):
        traced, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
        consts, jaxpr = traced.consts, traced.jaxpr
        whole = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
        given = *consts, *jax.tree.leaves(args)
        found = pipelining.run_ahead(*given, traced=jax.extend.core.ClosedJaxpr(whole, []))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return run


def parts_of(layers):
    return jax.random.normal(KEYS[1], (4, layers, SIZE // 4, SIZE)) / 6


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_loops_that_send_ahead_have_the_same_bits(layers):
    """With workers of `jax.vmap`, which need no devices that wait for each other."""
    parts = parts_of(layers)
    got, want = mapped(ahead(net))(parts, X), mapped(net)(parts, X)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_pipelined_functions_have_derivatives():
    parts = parts_of(2)

    def gradient(f):
        def loss(parts, x):
            return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(f(parts, x)))

        return mapped(jax.grad(loss))(parts, X)

    got, want = gradient(pipelining.pipelined(net)), gradient(net)
    np.testing.assert_array_equal(got, want)


class Program:
    """The computations of a compiled program.

    Args:
        text: of it.
    """

    def __init__(self, text):
        self.bodies, body = {}, None
        for line in text.splitlines():
            if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                body = self.bodies.setdefault(head[1], {})
            elif found := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = .*? ([a-z][\w\-]*)\((.*)", line):
                body[found[1]] = (found[2], found[3])
        self.loops = [self.bodies[name] for name in re.findall(r"body=%([\w.\-]+)", text)]

    def computes(self, operation, rest):
        """Whether an instruction is a matrix product, or has one inside."""
        called = re.findall(r"(?:calls|to_apply)=%([\w.\-]+)", rest)
        inside = (self.computes(*one) for name in called for one in self.bodies[name].values())
        return operation == "dot" or any(inside)

    def products(self, loop):
        return {name for name, one in loop.items() if self.computes(*one)}

    def before(self, loop, name):
        """The instructions of an iteration on which one of them depends."""
        found, todo = set(), [name]
        while todo:
            operands = re.findall(r"%([\w.\-]+)", loop[todo.pop()][1].partition("), ")[0])
            new = {operand for operand in operands if operand in loop} - found
            found |= new
            todo += new
        return found


def looped(layers=4, size=64):
    """The compiled gradients of a fully sharded model; nothing is run."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def loss(params, x):
        @jax.checkpoint
        def layer(x, own):
            return jnp.tanh(x @ jaxcomp.gathered(own)), None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    eight, four = jaxcomp.qsgd_inf(bits=8), jaxcomp.qsgd_inf(bits=4)
    f = jaxcomp.fully_sharded(
        loss, mesh, "x", P(None, "x"), weights=eight, gradients=four, stacked=("",)
    )
    likes = [
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((layers, size, size), (8, size))
    ]
    return jax.jit(f).lower(*likes, key=jnp.uint32(0)).compile()


def alone(loop, program, kind):
    """Whether neither a collective needs a product of its iteration, nor a product that."""
    products = program.products(loop)
    (one,) = [name for name, (operation, _) in loop.items() if operation == kind]
    needs = products & program.before(loop, one)
    needed = [name for name in products if one in program.before(loop, name)]
    return bool(products) and not needs and not needed


def test_layers_are_gathered_and_scattered_beside_other_layers(monkeypatch):
    """Forward and back, with the same bytes; as the loop is written, products wait for gathers."""
    plain = looped()
    program = Program(plain.as_text())
    assert [alone(loop, program, "all-gather") for loop in program.loops] == [False, False]

    monkeypatch.setattr(pipelining, "pipelined", ahead)
    compiled = looped()
    program = Program(compiled.as_text())
    forward, back = program.loops
    assert alone(forward, program, "all-gather")
    assert alone(back, program, "all-gather")
    assert alone(back, program, "all-to-all")
    assert jaxcomp.collective_bytes(compiled) == jaxcomp.collective_bytes(plain)
    one = 4 * 64 * 64
    more = [one.memory_analysis().temp_size_in_bytes for one in (compiled, plain)]
    assert more[0] - more[1] < 2 * one
