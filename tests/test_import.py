"""The annotations of shapes and dtypes hold: every part runs with them checked at run time."""

import os
import subprocess
import sys

SCRIPT = """
from jaxtyping import install_import_hook

with install_import_hook("jaxcomp", "beartype.beartype"):
    import jaxcomp
import jax
import jax.numpy as jnp
from suite import CODECS, FEW, SLOW, VARIANTS

tree = {"w": jnp.ones((40, 64)), "b": jnp.ones(7, jnp.bfloat16), "none": jnp.ones((0, 3))}
for codec in CODECS + VARIANTS if SLOW else CODECS[::2] + VARIANTS[::2]:
    jax.eval_shape(lambda x: jaxcomp.roundtrip(codec, 0, x), tree["w"])
for codec in FEW if SLOW else FEW[::2]:
    tx = jaxcomp.compressed_mean(codec, "data", stats=True)
    state = jax.tree.map(lambda x: jnp.stack([x] * 3), tx.init(tree))
    grads = jax.tree.map(lambda x: jnp.stack([x] * 3), tree)
    jax.eval_shape(jax.vmap(tx.update, axis_name="data"), grads, state)
    jax.eval_shape(lambda x: jaxcomp.roundtrip(codec, 0, x), tree)
    jaxcomp.describe(codec, tree, workers=3)
late = jaxcomp.Link(jaxcomp.top_k(), jaxcomp.MomentumCorrection(nesterov=True))
early = jaxcomp.Link(jaxcomp.top_k(fraction=0.5), late.feedback)
phases = jaxcomp.ReducerSchedule(((0, early), (2, late)))
powers = (jaxcomp.PowerIteration(), jaxcomp.PowerIteration(alternate=True))
for reducer in (phases, powers[0], *([jaxcomp.Dense(), *powers[1:]] if SLOW else [])):
    jaxcomp.testing.check_reducer(reducer)
jaxcomp.testing.check_feedback(jaxcomp.Residual(decay=0.5))
jaxcomp.testing.check_feedback(late.feedback)
jax.vmap(lambda g: jaxcomp.clip_local(1.0, "data").update(g, ())[0], axis_name="data")(tree["w"])
print("all annotations hold")
"""


def test_annotations_hold():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "XLA_FLAGS": flags},  # Types are checked when programs are traced.
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=TESTS,
    )
    assert "all annotations hold" in done.stdout, done.stderr[-3000:]


def test_nothing_happens_at_import():
    """No device is touched, no configuration changed."""
    script = """
import jax
from jax._src import xla_bridge
before = dict(jax.config.values)
import jaxcomp
assert not xla_bridge._backends, "a backend was initialised"
after = {name: jax.config.values[name] for name in before}  # Modules of JAX add options.
assert before == after, "configuration changed"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
