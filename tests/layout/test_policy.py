"""The codec that a policy chooses for a leaf."""

import jaxcomp


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
