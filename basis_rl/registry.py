"""Classes by their names: what ``baseline`` and ``prompt_sampler`` name in a recipe, built with their parameters."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import repeat
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from basis_rl.names import did_you_mean, import_object, kind_of

_Init = TypeVar("_Init", bound=Callable[..., None])


@dataclass(frozen=True)
class Bounds:
    """Which values a parameter takes, as in ``Positive = Annotated[float, Bounds("above 0", lambda x: x > 0)]``.

    Give it a name as there: within the annotation of a field, other names of the module would not be found.
    """

    words: str
    hold: Callable[[Any], bool]


Positive = Annotated[float, Bounds("above 0", lambda x: x > 0)]
NotNegative = Annotated[float, Bounds("of at least 0", lambda x: x >= 0)]
Share = Annotated[float, Bounds("from 0 to 1", lambda x: 0 <= x <= 1)]
PositiveShare = Annotated[float, Bounds("above 0, at most 1", lambda x: 0 < x <= 1)]
WholeNumber = Annotated[int, Bounds("of at least 0", lambda x: x >= 0)]
OneOrMore = Annotated[int, Bounds("of at least 1", lambda x: x >= 1)]


class Configured:
    """What has parameters that a recipe names: a dataclass, or a class with an ``__init__`` of its own."""

    def __post_init__(self) -> None:
        """Check the fields of a dataclass by their annotations.

        Raises:
            ValueError: a value of another type, another word than those of a `Literal`, or out of its `Bounds`.
        """
        try:
            annotations = get_type_hints(type(self), include_extras=True)
        # A class of the user's own may name what is imported for type checkers only.
        except NameError:
            return
        for each in fields(self):  # type: ignore[arg-type]
            _check(type(self).__name__, each.name, getattr(self, each.name), annotations[each.name])

    @property
    def parameters(self) -> dict[str, Any]:
        """What the object was built with, for model cards: its attributes that are named like arguments."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters if hasattr(self, name)}


def checked(owner: str) -> Callable[[_Init], _Init]:
    """For an ``__init__``: its arguments are checked by those annotations that have `Bounds` or a `Literal` in them.

    What is wrong with one of them is a ValueError, in which they are those of `owner`.
    """

    def decorate(init: _Init) -> _Init:
        @functools.wraps(init)
        def checking(self: Any, *args: Any, **kwargs: Any) -> None:
            annotations = get_type_hints(init, include_extras=True)
            for name, value in inspect.signature(init).bind(self, *args, **kwargs).arguments.items():
                if _is_limited(annotations.get(name)):
                    _check(owner, name, value, annotations[name])
            init(self, *args, **kwargs)

        return checking  # type: ignore[return-value]

    return decorate


def build(what: str, known: Mapping[str, type], base: type, name: str, params: Mapping[str, Any]) -> Any:
    """The class with that name in `known`, or your own as ``module:Class``, built with `params`.

    Args:
        what: the recipe's key, such as ``prompt_sampler``; its parameters are those of the key ``WHAT_kwargs``.
        known: the registered classes.
        base: what your own class has to be a subclass of.
        name: of the class.
        params: of its ``__init__``.

    Raises:
        ValueError: unknown name, unknown or missing parameter, or a parameter that the class refuses.
    """
    cls = find(what.replace("_", " "), known, name)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ValueError(f"'{name}' is not a subclass of {base.__module__.removesuffix('.base')}.{base.__name__}.")
    return construct(what.replace("_", " "), cls, name, params, f"{what}_kwargs")


def find(what: str, known: Mapping[str, Any], name: str, more: str = "") -> Any:
    """What is registered as `name` in `known`, or stands at ``module:name``, for which TRL also writes ``module.name``.

    Raises:
        ValueError: there is none; the message calls it a `what`, and ends with `more`.
    """
    if name in known:
        return known[name]
    if ":" in name or "." in name:
        return import_object(name, what)
    near = did_you_mean(name, known)
    raise ValueError(f"Unknown {what} '{name}'.{near} Known: {', '.join(known)}; your own is 'module:name'{more}.")


def construct(what: str, found: Any, name: str, params: Mapping[str, Any], key: str) -> Any:
    """An object of the class `found`, built with `params`; any other object as it is.

    Args:
        what: what it is called in messages.
        found: what `find` has found.
        name: as it was asked for.
        params: of its ``__init__``.
        key: the recipe's key for them.

    Raises:
        ValueError: unknown or missing parameters, some that the class refuses, or parameters of a function.
    """
    if not callable(found):
        raise ValueError(f"'{name}' is {kind_of(found)}, not a function.")
    if not isinstance(found, type):
        if params:
            raise ValueError(f"{key}: '{name}' is {kind_of(found)}, which has no parameters to set; a class has.")
        return found
    _check_names(f"{what.capitalize()} '{name}'", found, params, key)
    try:
        return found(**params)
    except TypeError as error:
        raise ValueError(f"{key} {dict(params)} do not fit '{name}': {error}.") from error


def name_of(known: Mapping[str, type], built: object) -> str:
    """The registered name of an object, or that of its class."""
    return next((name for name, cls in known.items() if cls is type(built)), type(built).__name__)


def _check_names(title: str, cls: type, params: Mapping[str, Any], key: str) -> None:
    everything = inspect.signature(cls).parameters.values()
    named = {each.name: each for each in everything if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in everything)
    for unknown in () if takes_any else [name for name in params if name not in named]:
        hint = did_you_mean(unknown, named)
        raise ValueError(
            f"{title} has no parameter '{unknown}'.{hint} Its parameters: {', '.join(named) or 'none'}. If `{key}` is "
            f"that of another one in the recipe, replace it: --{key} '{{}}'."
        )
    for missing in (each.name for each in named.values() if each.default is each.empty and each.name not in params):
        message = getattr(cls, "ON_MISSING", {}).get(missing)
        way_out = f": {message}" if message else "."
        raise ValueError(f"{title} needs the parameter '{missing}' (recipe: `{key}`){way_out}")


def _check(owner: str, name: str, value: Any, annotation: Any) -> None:
    if not _is_a(value, annotation):
        raise ValueError(f"{owner}: {name} must be {_in_words(annotation)}, got {value!r}.")


def _is_limited(annotation: Any) -> bool:
    return get_origin(annotation) in (Annotated, Literal) or any(map(_is_limited, get_args(annotation)))


def _is_a(value: Any, annotation: Any) -> bool:
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin in (Union, types.UnionType):
        return any(_is_a(value, each) for each in arguments)
    if origin is Annotated:
        bounds = [each for each in arguments[1:] if isinstance(each, Bounds)]
        return _is_a(value, arguments[0]) and all(each.hold(value) for each in bounds)
    if origin is Literal:
        return value in arguments
    if origin in (tuple, Sequence):
        # YAML has lists only.
        is_list = isinstance(value, (list, tuple)) and (origin is Sequence or len(value) == len(arguments))
        return is_list and all(map(_is_a, value, arguments if origin is tuple else repeat(arguments[0])))
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_is_a(each, arguments[1]) for each in value.values())
    if annotation in (float, int):
        number = isinstance(value, Real if annotation is float else Integral) and not isinstance(value, bool)
        # Not NaN.
        return number and value == value
    return annotation is Any or isinstance(value, origin or annotation)


def _in_words(annotation: Any) -> str:
    """A type as a message says it."""
    words = {float: "a number", int: "a whole number", bool: "true or false", type(None): "null", str: "text"}
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return " ".join([_in_words(arguments[0]), *(each.words for each in arguments[1:] if isinstance(each, Bounds))])
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin in (tuple, Sequence):
        return "a list of numbers" if origin is Sequence else f"a list of {len(arguments)} numbers"
    if origin is Mapping:
        return "a mapping"
    if arguments:
        return " or ".join(map(_in_words, arguments))
    return words.get(annotation, annotation.__name__)
