"""Codecs and reducers are built from what users type, and nothing else is run."""

import math

import pytest

import jaxcomp
from jaxcomp import expressions
from jaxcomp.recipes import catalogue


@pytest.mark.parametrize("text", catalogue.expressions())
def test_every_recipe_is_read_as_typed_and_as_printed(text):
    codec = expressions.evaluate(text)
    assert codec == expressions.evaluate(f" jaxcomp.{text}")
    assert codec == expressions.evaluate(repr(codec))


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("sign", jaxcomp.sign()),
        ("jaxcomp.sign", jaxcomp.sign()),
        ("top_k(fraction=1/100)", jaxcomp.top_k(0.01)),
        ("qsgd(bits=2**2, bucket_size=8*64)", jaxcomp.qsgd(bits=4, bucket_size=512)),
        ("jaxcomp.codecs.Rice(k=1 + 1)", jaxcomp.codecs.Rice(k=2)),
        ("codecs.Rice(k=2)", jaxcomp.codecs.Rice(k=2)),
        (
            "Link(sign, Residual(decay=0.5))",
            jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual(decay=0.5)),
        ),
        (
            "Policy(sign, rules=[Rule('*bias', None)])",
            jaxcomp.Policy(jaxcomp.sign(), rules=(jaxcomp.Rule("*bias", None),)),
        ),
        (
            "Robust(qsgd, CoordinateMedian)",
            jaxcomp.Robust(jaxcomp.qsgd(), jaxcomp.aggregates.CoordinateMedian()),
        ),
    ],
)
def test_what_users_type(text, same):
    assert expressions.evaluate(text) == same


def test_numbers_may_be_negative_and_infinite():
    assert expressions.evaluate("-3 - 1") == -4
    assert expressions.evaluate("-inf") == -math.inf


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "open('/etc/passwd')",
        "sign.__class__",
        "jaxcomp.codecs.__loader__",
        "jaxcomp.codecs.qsgd()",  # It lives in jaxcomp.
        "jaxcomp.planning.plots.save",
        "jax.devices()",
        "[sign() for _ in range(9)]",
        "(lambda: sign())()",
        "sign() if True else 0",
        "top_k(*[0.1])",
        "top_k(**{'fraction': 0.1})",
        "f'{sign()}'",
        "9**9**9**9",
        "'a' * 9",
        "sign() + 1",
        "",
        "(" * 10_000,
    ],
)
def test_nothing_else_is_run(text):
    with pytest.raises(ValueError, match=r"must be|cannot be built"):
        expressions.evaluate(text)
