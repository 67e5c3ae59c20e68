"""Interfaces hold every hook, wrappers forward them, and a class that does not fit is refused."""

import dataclasses
import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import pytest

import jaxcomp
from jaxcomp import base, testing
from jaxcomp.base import (
    Aggregate,
    Codec,
    Facts,
    Feedback,
    Gate,
    Hints,
    Reducer,
    ReducerFacts,
    WrappedCodec,
    interface,
)

NOUNS = (Aggregate, Codec, Feedback, Gate, Reducer)
CLAIMS = {"unbiased", "linear", "variance_bound", "hints"}
"""What a wrapper may break, so that it must claim it anew."""
AROUND = {"summable", "segmented", "segments", "mean_of_senders", "for_leaf", "decode_sum"} | {
    "leafwise"
}
"""Ways past `decode`, which lead past a wrapper's own: it has those of every codec, or its own."""
MOST = {Codec: 20, Reducer: 10}
"""The largest number of public members, so that a person can hold an interface in mind."""


def concrete(noun):
    for module in pkgutil.walk_packages(jaxcomp.__path__, "jaxcomp."):
        importlib.import_module(module.name)  # Otherwise a class is known once it is used.
    found = [noun]
    for kind in found:
        found += [sub for sub in kind.__subclasses__() if sub not in found]
    return [kind for kind in found if not kind._abstract and kind.__module__.startswith("jaxcomp")]


WRAPPERS = concrete(WrappedCodec)


def odd():
    """A codec whose hooks and facts all differ from their defaults."""

    @dataclasses.dataclass(frozen=True)
    class Odd(Codec):
        bucket_size: int | None = 48
        unbiased: bool = True
        contractive = True
        facts = Facts(7.25, False, True, True, 2, 1.5, *(True,) * 7, worst=0.5)

        def agree(self, key, x, count, state, axis_name):
            return "agreed"

        def side(self, agreed):
            return agreed

        def clipped(self, key, x, count):
            return jnp.stack([count, count], axis=1)

        def mean_of_senders(self, keys, payloads, like, weights=None):
            return jnp.zeros(like.shape)

        def for_leaf(self, shape, dtype, stacked=0):
            return None, "odd"

        def variance_bound(self, size, peak=None):
            return 0.25

        def init(self, like):
            return jnp.zeros(like.shape)

        def encode(self, key, x, count, state):
            return (x,), state

        def decode(self, key, payload, like, side=None):
            return payload[0]

    return Odd()


def around(wrapper, codec):
    """An instance with the other arguments that the class requires."""
    made = object.__new__(wrapper)
    for field in dataclasses.fields(wrapper):
        known = field.default is not dataclasses.MISSING
        given = {"codec": codec, "fraction": 0.5, "stages": 2, "omega": 1.0}
        value = given.get(field.name, field.default if known else None)
        object.__setattr__(made, field.name, value)
    return made


@pytest.mark.parametrize("hook", [n for n in interface.hooks(Codec) if n not in CLAIMS | AROUND])
@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda kind: kind.__name__)
def test_every_wrapper_forwards_every_hook(wrapper, hook):
    """The hooks that a wrapper changes itself are exempt."""
    if hook in vars(wrapper):
        return
    codec = odd()
    outer = around(wrapper, codec)
    if hook == "facts":
        lost = {"keeps_zeros", "scales_sums", "names_senders", "shaped"}
        kept = {fact.name for fact in dataclasses.fields(Facts)} - lost
        assert all(getattr(outer.facts, fact) == getattr(codec.facts, fact) for fact in kept)
        assert not any(getattr(outer.facts, fact) for fact in lost)
    elif not inspect.isfunction(vars(Codec).get(hook)):
        assert getattr(outer, hook) == getattr(codec, hook)
    else:
        assert getattr(wrapper, hook) is getattr(WrappedCodec, hook)


@pytest.mark.parametrize("hook", [n for n in interface.hooks(Codec) if n not in CLAIMS | AROUND])
def test_the_forwarding_base_calls_every_method(hook):
    called = []

    class Spy:
        facts = Facts(agrees=True)

        def __getattr__(self, name):
            return lambda *args: called.append(name) or args[1:3]

    @dataclasses.dataclass(frozen=True)
    class Plain(WrappedCodec):
        codec: Codec
        unbiased = True

    if inspect.isfunction(vars(Codec).get(hook)):
        x = jnp.zeros((1, 64))
        given = {"x": x, "count": jnp.full(1, 64), "like": x}
        names = list(inspect.signature(getattr(Codec, hook)).parameters)[1:]
        getattr(Plain(Spy()), hook)(*(given.get(name) for name in names))
        assert called == [hook]


@pytest.mark.parametrize("noun", MOST, ids=lambda kind: kind.__name__)
def test_an_interface_has_few_members(noun):
    assert len(interface.hooks(noun)) <= MOST[noun]


@pytest.mark.parametrize("declared", [Facts, Hints, ReducerFacts], ids=lambda kind: kind.__name__)
def test_what_is_declared_is_explained_and_has_a_default(declared):
    declared()
    assert declared.__dataclass_params__.frozen
    for field in dataclasses.fields(declared):
        assert f"{field.name}:" in declared.__doc__, field.name


@pytest.mark.parametrize("noun", NOUNS, ids=lambda kind: kind.__name__)
def test_hooks_have_docstrings_and_parts_are_final_settings(noun):
    for name in interface.hooks(noun):
        hook = vars(noun).get(name)
        text = hook.fget.__doc__ if isinstance(hook, property) else inspect.getdoc(hook)
        plain = name in inspect.get_annotations(noun) or not (
            inspect.isfunction(hook) or isinstance(hook, property)
        )
        assert f"{name}:" in noun.__doc__ if plain else text, name
    for kind in concrete(noun):
        assert dataclasses.is_dataclass(kind), kind
        assert kind.__dataclass_params__.frozen, kind
        with pytest.raises(TypeError, match="which is final: wrap an instance of it"):
            type("Derived", (kind,), {})


def test_a_sum_in_another_domain_is_forwarded():
    inner = jaxcomp.random_k(0.1, bucket_size=64)
    x = testing.bias.gaussian(700)
    testing.assert_sums(jaxcomp.codecs.Contractive(codec=inner), x)


def test_a_misspelt_hook_raises():
    with pytest.raises(TypeError, match="decode_summ is no hook of Codec; did you mean dec"):

        class Bad(Codec):
            bucket_size = None
            unbiased = True

            def encode(self, key, x, count, state):
                return x, state

            def decode(self, key, payload, like, side=None):
                return payload

            def decode_summ(self, keys, payloads, like, weights=None, side=None):
                return payloads


def plain(**members):
    """A codec with these members beside the methods that every codec has."""

    def encode(self, key, x, count, state):
        return x, state

    def decode(self, key, payload, like, side=None):
        return payload

    required = {"bucket_size": None, "unbiased": True, "encode": encode, "decode": decode}
    return type("Own", (Codec,), required | members)


def agree(self, key, x, count, state, axis_name):
    return state


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("bits_per_element", r"facts = jaxcomp\.base\.Facts\(bits_per_element="),
        ("homogenous", r"facts = jaxcomp\.base\.Facts\(homogeneous="),
        ("agrees", r"facts = jaxcomp\.base\.Facts\(agrees="),
        ("unit", r"hints = jaxcomp\.base\.Hints\(unit="),
    ],
)
def test_a_fact_outside_of_the_facts_raises_and_leads_there(name, where):
    with pytest.raises(TypeError, match=rf"Own\.{name} is no hook of Codec; did you mean {where}"):
        plain(**{name: True})


def test_facts_that_contradict_the_methods_raise():
    assert plain(agree=agree, facts=Facts(agrees=True)).facts.agrees
    with pytest.raises(
        TypeError, match=r"Own\.facts must have agrees=True, since .* defines agree"
    ):
        plain(agree=agree)
    with pytest.raises(TypeError, match="Own must define side, since its facts have sided=True"):
        plain(facts=Facts(sided=True))
    with pytest.raises(TypeError, match=r"Own\.facts must be jaxcomp\.base\.Facts"):
        plain(facts={"agrees": True})
    with pytest.raises(TypeError, match=r"Own\.hints must be jaxcomp\.base\.Hints"):
        plain(hints=Facts())
    with pytest.raises(TypeError, match=r"Own\.unit must not be a field: it is .* by hints = "):
        plain(unit=64, __annotations__={"unit": int})
    with pytest.raises(ValueError, match="`scales_sums` must be False without `sided`"):
        Facts(scales_sums=True)


def test_a_wrapper_keeps_facts_that_it_does_not_change():
    with pytest.raises(TypeError, match=r"Own\.facts must keep those of the wrapped codec"):
        type("Own", (WrappedCodec,), {"codec": None, "unbiased": True, "facts": Facts()})
    with pytest.raises(TypeError, match="homogenous"):
        base.changed(homogenous=False)


def test_a_half_implemented_hook_raises():
    with pytest.raises(TypeError, match="Half must define decode, as Codec says"):

        class Half(Codec):
            bucket_size = None
            unbiased = True

            def encode(self, key, x, count, state):
                return x, state

    with pytest.raises(TypeError, match="Classless must have unbiased, as Codec says"):

        class Classless(Codec):
            bucket_size = None

            def encode(self, key, x, count, state):
                return x, state

            def decode(self, key, payload, like, side=None):
                return payload

    with pytest.raises(TypeError, match=r"Blind.decode must have the arguments \(self, key, payl"):

        class Blind(Codec):
            bucket_size = None
            unbiased = True

            def encode(self, key, x, count, state):
                return x, state

            def decode(self, key, payload, like):
                return payload

    with pytest.raises(TypeError, match="Nameless must define update, as Feedback says"):

        class Nameless(Feedback):
            def init(self, like, part_like):
                return ()

            def compensate(self, x, state):
                return x, state

    with pytest.raises(TypeError, match=r"Former\.kind is no hook of Feedback"):

        class Former(Feedback):
            kind = "residual"

    with pytest.raises(TypeError, match=r"Shut\.opens is no hook of Gate"):

        class Shut(Gate):
            closes = False

            def opens(self):
                return True


def test_names_of_its_own_are_listed():
    class Named(Gate, public=("period",)):
        closes = False

        def period(self):
            return 3

        def open(self, key, tree, state, axis_name, params=None):
            return base.Opened(jnp.ones((), bool), None, state)

    assert Named().period() == 3
    assert Named().init(jax.ShapeDtypeStruct((), jnp.float32)) == ()
