"""Lookups in a sharded table under a manual axis, in which XLA ends the process."""

import functools
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from helpers.paths import ROOT
from helpers.sharding import QSGD, make_mesh
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxcomp

ROWS, WIDE = 64, 32
BATCH = P(("dcn", "fsdp"))
LOOKUPS = {
    "index": lambda table, tokens: table[tokens],
    "take": lambda table, tokens: jnp.take(table, tokens, axis=0),
    "cast before": lambda table, tokens: table.astype(jnp.bfloat16)[tokens].astype(jnp.float32),
    "in jit": lambda table, tokens: jax.jit(lambda t, k: t[k])(table, tokens),
    "in remat": lambda table, tokens: jax.checkpoint(lambda t, k: jnp.sin(t[k]))(table, tokens),
    "in scan": lambda table, tokens: jax.lax.scan(lambda _, own: (None, table[own]), None, tokens)[
        1
    ],
}
CURES = {
    "one hot": lambda table, tokens: jax.nn.one_hot(tokens, ROWS) @ table,
    "gathered": lambda table, tokens: jax.lax.with_sharding_constraint(table, P())[tokens],
}


def lowered(lookup, spec, sizes=None):
    mesh = make_mesh(sizes or {"dcn": 2, "fsdp": 2, "tensor": 2})
    specs = {"table": spec, "w": P()}
    shapes = {"table": (ROWS, WIDE), "w": (WIDE, WIDE)}

    def like(shape, spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = {name: like(shape, specs[name]) for name, shape in shapes.items()}
    policy = jaxcomp.Policy(QSGD, min_size=0)
    tx = jaxcomp.compressed_mean(policy, "dcn", param_specs=specs)

    def loss(params, tokens):
        return (jnp.tanh(lookup(params["table"], tokens)) @ params["w"]).std()

    def step(params, state, tokens):
        grads = jax.grad(loss)(jaxcomp.local(params, "dcn"), tokens)
        return tx.update(grads, state)

    run = jaxcomp.data_parallel(step, mesh, "dcn", batch_spec=BATCH)
    state = jax.eval_shape(lambda: jaxcomp.init_state(tx, params, mesh, "dcn"))
    return run.lower(params, state, like((8, 4), BATCH, jnp.int32))


SHARDED = r"'table', of spec P\('tensor', 'fsdp'\), is indexed"


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_in_a_sharded_table_warns(name):
    with pytest.warns(UserWarning, match=SHARDED) as found:
        lowered(LOOKUPS[name], P("tensor", "fsdp"))
    said = str(found[0].message)
    assert "PartitionSpec(('fsdp', 'tensor'))" in said
    assert ("test_lookups.py" in said) == (name != "take")  # JAX keeps no line in its own jit.


@pytest.mark.parametrize("spec", [P("tensor"), P("fsdp"), P(None, "fsdp"), P(None, "tensor")])
def test_one_of_two_axes_warns(spec):
    with pytest.warns(UserWarning, match="'table', of spec .*, is indexed at .*test_lookups.py"):
        lowered(LOOKUPS["index"], spec)


BOTH, ONE = P("tensor", "fsdp"), {"dcn": 2, "fsdp": 4, "tensor": 1}
QUIET = {
    **{name: (cure, BOTH, None) for name, cure in CURES.items()},
    "one dimension": (LOOKUPS["index"], P(("fsdp", "tensor")), None),
    "other dimension": (LOOKUPS["index"], P(None, ("tensor", "fsdp")), None),
    "replicated": (LOOKUPS["index"], P(), None),
    "an axis of one device": (LOOKUPS["index"], BOTH, ONE),
    "a slice": (lambda table, _: jax.lax.dynamic_slice_in_dim(table, 3, 8), BOTH, None),
}


@pytest.mark.parametrize("name", QUIET)
def test_no_warning_where_the_program_compiles(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered(*QUIET[name])


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in QUIET if name != "a slice"])
def test_cures_compile(name):
    lowered(*QUIET[name]).compile({"xla_backend_optimization_level": 0})


@pytest.mark.full
def test_xla_still_aborts():
    """Where this fails, XLA can partition such a lookup, and the warning is to be removed."""
    script = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import jax
jax.config.update("jax_num_cpu_devices", 8)
from misuse import test_lookups as this
this.lowered(this.LOOKUPS["index"], this.P("tensor", "fsdp")).compile()
"""
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=False)
    done = run([sys.executable, "-c", script], timeout=120)
    assert done.returncode < 0
    assert "is indexed at" in done.stderr
    assert "Check failed" in done.stderr
