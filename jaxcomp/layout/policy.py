"""Policies, which choose a codec for each leaf; as data, they can be printed and compared."""

import dataclasses
import fnmatch
import glob
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxcomp import checks
from jaxcomp.base import Codec

BY_RULE = "rule "
"""Begins the reason for a codec that a rule gives."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule of a policy: the codec for leaves whose path matches.

    Args:
        path: a glob over the leaf's path, as in `"*/embedding"` or `"params/Dense_*/kernel"`;
            paths are written as `describe` prints them.
        codec: the codec for these leaves; None sends them dense, in their own dtype.
        min_size: the smallest number of elements of a leaf to which the rule applies.
        min_ndim: the smallest number of dimensions of a leaf to which the rule applies.
    """

    path: str
    codec: Codec | None
    min_size: int = 0
    min_ndim: int = 0

    def __post_init__(self):
        if not isinstance(self.path, str):
            raise ValueError(f"`path` must be a glob string such as '*/kernel', got {self.path!r}")
        _check_codec(self.codec)
        checks.integer("min_size", self.min_size, 0)
        checks.integer("min_ndim", self.min_ndim, 0)

    def matches(self, path: str, shape: tuple[int, ...]) -> bool:
        """Whether the rule applies to this leaf."""
        return (
            fnmatch.fnmatchcase(path, self.path)
            and math.prod(shape) >= self.min_size
            and len(shape) >= self.min_ndim
        )


@dataclasses.dataclass(frozen=True)
class Policy:
    """Chooses a codec for each leaf: that of the first matching rule, else the default for large
    leaves.

    Args:
        codec: the default, for leaves that match no rule and are large enough.
        rules: the rules, in order.
        min_size: smaller leaves that match no rule are sent dense.
        min_ndim: leaves of fewer dimensions (biases, norms) that match no rule are sent dense.
        rest: the codec of the leaves that would be sent dense; None to send them dense.
        stacked: globs of leaves whose first axis indexes layers or experts, as `flax.linen.scan`
            makes it: `min_size` and `min_ndim`, of rules too, are those of one layer, and low rank
            makes a matrix of each layer.

    Raises:
        ValueError: for arguments of the wrong kind.

    Example:
        >>> import jaxcomp
        >>> policy = Policy(
        ...     jaxcomp.qsgd_inf(bits=4),
        ...     rules=(Rule("*/embedding", jaxcomp.qsgd_inf(bits=8)), Rule("head/*", None)),
        ... )
        >>> policy.choose("head/kernel", (64, 10))
        (None, "rule 'head/*'")
    """

    codec: Codec | None
    rules: tuple[Rule, ...] = ()
    min_size: int = 1024
    min_ndim: int = 2
    rest: Codec | None = None
    stacked: tuple[str, ...] | None = None

    def __post_init__(self):
        _check_codec(self.codec)
        _check_codec(self.rest)
        globs = () if self.stacked is None else self.stacked
        if not isinstance(globs, tuple) or not all(isinstance(one, str) for one in globs):
            raise ValueError(
                f"`stacked` must be a tuple of glob strings such as ('blocks/*',), got {globs!r}"
            )
        if not isinstance(self.rules, tuple) or not all(isinstance(r, Rule) for r in self.rules):
            raise ValueError(f"`rules` must be a tuple of jaxcomp.Rule, got {self.rules!r}")
        checks.integer("min_size", self.min_size, 0)
        checks.integer("min_ndim", self.min_ndim, 0)

    def choose(
        self, path: str, shape: tuple[int, ...], dtype: Any = "float32"
    ) -> tuple[Codec | None, str]:
        """The codec of a leaf, None for dense, and the reason."""
        own = self._of_layer(path, shape)
        codec, why = self._decide(path, own)
        codec = self.rest if codec is None else codec
        if len(own) < len(shape):
            why = f"{why}, as each of {shape[0]} layers"
        if codec is None:
            return None, why
        fitting, objection = codec.for_leaf(shape, dtype, len(shape) - len(own))
        return fitting, why if objection is None else f"{why}, {objection}"

    def _decide(self, path: str, shape: tuple[int, ...]) -> tuple[Codec | None, str]:
        for rule in self.rules:
            if rule.matches(path, shape):
                return rule.codec, f"{BY_RULE}{rule.path!r}"
        if len(shape) < self.min_ndim:
            return None, f"{len(shape)}-D, below min_ndim={self.min_ndim}"
        if math.prod(shape) < self.min_size:
            return None, f"below min_size={self.min_size}"
        return self.codec, "default"

    def for_leaves(self, shapes: Mapping[str, tuple[int, ...]]) -> "Policy":
        """The policy with one rule for each leaf, which holds however the leaf is reshaped.

        Args:
            shapes: the shape of each leaf, by its path.
        """
        rules = (Rule(glob.escape(path), self.choose(path, x)[0]) for path, x in shapes.items())
        return Policy(None, tuple(rules))

    def unused(self, paths: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
        """The globs of rules that match none of these leaves, and of `stacked`."""
        own = list(map(self._of_layer, paths, shapes))
        idle = [rule.path for rule in self.rules if not any(map(rule.matches, paths, own))]
        for one in self.stacked or ():
            if not any(fnmatch.fnmatchcase(path, one) for path in paths):
                idle.append(one)
        return tuple(idle)

    def _of_layer(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one layer of a stacked leaf; of any other leaf its own."""
        layers = any(fnmatch.fnmatchcase(path, one) for one in self.stacked or ())
        return shape[1:] if layers else shape

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Every codec that a leaf may get."""
        found = [rule.codec for rule in self.rules] + [self.codec, self.rest]
        return tuple(codec for codec in found if codec is not None)

    def map(self, f: Callable[[Codec], Codec]) -> "Policy":
        """The same policy with `f(codec)` in place of every codec."""
        rules = tuple(
            rule if rule.codec is None else dataclasses.replace(rule, codec=f(rule.codec))
            for rule in self.rules
        )
        codec, rest = (None if one is None else f(one) for one in (self.codec, self.rest))
        return dataclasses.replace(self, codec=codec, rules=rules, rest=rest)


def everywhere(codec: Codec) -> Policy:
    """The policy that compresses every leaf, whatever its size."""
    return Policy(codec, min_size=0, min_ndim=0)


def of(codec: "Codec | Policy") -> Policy:
    """The default policy for a bare codec; a policy is returned unchanged."""
    return codec if isinstance(codec, Policy) else Policy(codec)


def without_codecs(policy: Policy) -> tuple:
    """The settings of a policy that determine which leaves share a codec."""
    rules = [(r.path, r.min_size, r.min_ndim, r.codec is None) for r in policy.rules]
    dense = policy.codec is None, policy.rest is None
    return policy.min_size, policy.min_ndim, policy.stacked, *dense, tuple(rules)


def _check_codec(codec) -> None:
    if codec is not None and not isinstance(codec, Codec):
        raise ValueError(
            "`codec` must be a codec such as jaxcomp.qsgd_inf(bits=4), or None for dense, "
            f"got {codec!r}"
        )


NOTHING = Policy(None)
"""The policy that leaves every leaf dense."""
