"""Checks of every class that implements an interface, made when the class is created.

An abstract class holds every hook with its default. A concrete class is final, and must not have a
public name that is not a hook. So a misspelt hook is an error, instead of silently leaving the
default in place.
"""

import abc
import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_NONE = object()


def derived(value: Callable[[Any], T]) -> T:
    """A default that follows from other hooks; a class may replace it by a constant or a property.

    It is a property, which type checkers see as an attribute.
    """
    found: Any = property(value)
    return found


class Interface(metaclass=abc.ABCMeta):  # noqa: B024 - Its subclasses have the methods.
    """Base of the interfaces, such as `Codec`; a subclass is checked when it is created.

    Args:
        abstract: True for a subclass that is an interface itself and may define hooks.
        public: the public names of a concrete class beside the hooks, such as methods for tests.

    Raises:
        TypeError: if a concrete class has a public name that is neither a hook, a field nor in
            `public`, lacks a hook that has no default, gives a hook other arguments, or derives
            from another concrete class.

    Example:
        >>> class Shape(Interface, abstract=True):
        ...     def area(self) -> float:
        ...         return 0.0
        >>> class Square(Shape):
        ...     def aera(self) -> float:
        ...         return 1.0
        Traceback (most recent call last):
        TypeError: Square.aera is no hook of Shape; did you mean area? ...
    """

    _abstract = True

    def __init_subclass__(cls, *, abstract: bool = False, public: tuple[str, ...] = (), **rest):
        super().__init_subclass__(**rest)
        cls._abstract = abstract
        if abstract:
            return
        above = [base for base in cls.__mro__[1:] if issubclass(base, Interface)]
        concrete = [base for base in above if not base._abstract]
        if concrete:
            raise TypeError(
                f"{cls.__name__} must not derive from {concrete[0].__name__}, which is final: wrap "
                "an instance of it, or derive from the interface"
            )
        bases = [base for base in above if base is not Interface]
        _check_names(cls, bases, public)
        _check_complete(cls, bases)


def _check_names(cls: type, bases: list[type], public: tuple[str, ...]) -> None:
    fields = set(inspect.get_annotations(cls))
    for name in fields - set(vars(cls)):
        if any(isinstance(vars(base).get(name), property) for base in bases):
            raise TypeError(
                f"{cls.__name__}.{name} must have a default, or not be a field: without one, the "
                "interface's property would be taken for it"
            )
    for name, found in vars(cls).items():
        if name.startswith("_") or name in public:
            continue
        hook = next((vars(base)[name] for base in bases if name in vars(base)), _NONE)
        if hook is _NONE:
            if name not in fields and not any(name in _attributes(base) for base in bases):
                raise TypeError(_unknown(cls, name, bases))
        elif inspect.isfunction(hook) and name not in fields:
            _check_arguments(cls, name, found, hook)


def _unknown(cls: type, name: str, bases: list[type]) -> str:
    hooks = {n: n for base in bases for n in (*vars(base), *_attributes(base)) if n[0] != "_"}
    for attribute, value in ((n, v) for base in bases for n, v in vars(base).items()):
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                kind = f"jaxcomp.base.{type(value).__name__}"
                hooks[field.name] = f"{attribute} = {kind}({field.name}=...)"
    near = difflib.get_close_matches(name, sorted(hooks), 1)
    said = f"; did you mean {hooks[near[0]]}?" if near else "."
    return (
        f"{cls.__name__}.{name} is no hook of {bases[0].__name__}{said} A name of the class's own "
        f"begins with an underscore, or is listed: class {cls.__name__}({bases[0].__name__}, "
        f"public=({name!r},))"
    )


def _check_arguments(cls: type, name: str, found: Any, hook: Any) -> None:
    if not callable(found):
        raise TypeError(f"{cls.__name__}.{name} must be a method, as it is in the interface")
    wanted = [p.name for p in inspect.signature(hook).parameters.values()]
    given = list(inspect.signature(found).parameters.values())
    extra = [
        p.name for p in given[len(wanted) :] if p.default is p.empty and p.kind < p.KEYWORD_ONLY
    ]
    if [p.name for p in given[: len(wanted)]] != wanted or extra:
        raise TypeError(
            f"{cls.__name__}.{name} must have the arguments ({', '.join(wanted)}), got "
            f"({', '.join(p.name for p in given)})"
        )


def _check_complete(cls: type, bases: list[type]) -> None:
    fields = {
        name for base in cls.__mro__ for name in inspect.get_annotations(base) if base not in bases
    }
    for base in bases:
        for name, hook in vars(base).items():
            if getattr(hook, "__isabstractmethod__", False) and getattr(cls, name) is hook:
                raise TypeError(f"{cls.__name__} must define {name}, as {base.__name__} says")
        for name in _attributes(base):
            if name not in fields and not hasattr(cls, name):
                raise TypeError(f"{cls.__name__} must have {name}, as {base.__name__} says")


def _attributes(base: type) -> dict[str, Any]:
    """The attributes that an interface declares without a value."""
    return inspect.get_annotations(base)


def forward(wrapper: type, field: str, names: tuple[str, ...]) -> None:
    """Makes `wrapper` forward these hooks to the object in its field `field`.

    A hook that `wrapper` defines itself is kept.
    """
    base = wrapper.__mro__[1]
    for name in names:
        if name not in vars(wrapper):
            hook = vars(base).get(name)
            forwarded = _method if inspect.isfunction(hook) else _value
            setattr(wrapper, name, forwarded(field, name, hook))


def _method(field: str, name: str, hook: Any) -> Any:
    @functools.wraps(hook)
    def forwarded(self, *args, **kwargs):
        return getattr(getattr(self, field), name)(*args, **kwargs)

    return forwarded


def _value(field: str, name: str, hook: Any) -> property:
    del hook
    return property(lambda self: getattr(getattr(self, field), name), doc=f"As `{field}.{name}`.")


def hooks(interface: type) -> tuple[str, ...]:
    """The public names of an interface, in the order in which it defines them."""
    declared = (*inspect.get_annotations(interface), *vars(interface))
    return tuple(dict.fromkeys(name for name in declared if not name.startswith("_")))
