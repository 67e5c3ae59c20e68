"""The codec that a policy chooses for a leaf."""

import jax
import jax.numpy as jnp
import pytest

import jaxcomp
from jaxcomp.layout import policy as policy_, trees
from jaxcomp.messages import fingerprint


def test_policy_and_paths():
    policy = jaxcomp.Policy(
        jaxcomp.qsgd_inf(),
        rules=(
            jaxcomp.Rule("*/embedding", jaxcomp.cast()),
            jaxcomp.Rule("head/*", None),
            jaxcomp.Rule("*bias", jaxcomp.sign(), min_size=100),
        ),
    )
    assert policy.choose("a/embedding", (3,))[0] == jaxcomp.cast()
    assert policy.choose("head/kernel", (64, 64)) == (None, "rule 'head/*'")
    assert policy.choose("a/bias", (200,))[0] == jaxcomp.sign()
    assert policy.choose("a/bias", (64,))[0] is None
    assert policy.choose("a/kernel", (64, 64))[0] == jaxcomp.qsgd_inf()
    assert hash(policy) == hash(jaxcomp.Policy(jaxcomp.qsgd_inf(), rules=policy.rules))


def test_a_policy_counts_one_of_the_stacked_layers():
    """A stack of layers gets the codecs of the same layers apart."""
    shapes = {"kernel": (64, 80), "bias": (2000,), "small": (20, 40), "scale": ()}
    apart = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    layers = {k: jax.ShapeDtypeStruct((12, *x.shape), x.dtype) for k, x in apart.items()}
    rules = (jaxcomp.Rule("*small", jaxcomp.sign(), min_ndim=3),)
    for codec in (jaxcomp.qsgd_inf(), jaxcomp.codecs.LowRank(rank=2)):
        plain = jaxcomp.Policy(codec, rules=rules)
        seen = jaxcomp.Policy(codec, rules=rules, stacked=("blocks/*",))
        wanted = trees.layout(plain, {"blocks": apart})
        found = trees.layout(seen, {"blocks": layers})
        assert found.paths[found.dense[0]] == "blocks/bias"
        assert found.dense == wanted.dense == (0, 2, 3)
        assert found.reasons[0] == "1-D, below min_ndim=2, as each of 12 layers"
        assert len(trees.layout(plain, {"blocks": layers}).dense) < 3
        assert trees.layout(seen, {"blocks": apart["kernel"]}).unused == ("*small", "blocks/*")
    assert found.codecs[1].matrix == (12, 64, 80)
    assert wanted.codecs[1].matrix == (1, 64, 80)


def test_a_policy_without_stacks_is_identified_as_before():
    """So that messages of senders that do not know the field are read."""
    plain = jaxcomp.Policy(jaxcomp.sign())
    stacked = jaxcomp.Policy(jaxcomp.sign(), stacked=("blocks/*",))
    assert "stacked" not in fingerprint.text(plain)
    assert "stacked=('blocks/*')" in fingerprint.text(stacked)
    assert policy_.without_codecs(plain) != policy_.without_codecs(stacked)


@pytest.mark.wrong_types
def test_wrong_stacks_are_refused():
    for stacked in ("blocks/*", (1,)):
        with pytest.raises(ValueError, match="`stacked` must be a tuple of glob strings"):
            jaxcomp.Policy(jaxcomp.sign(), stacked=stacked)
