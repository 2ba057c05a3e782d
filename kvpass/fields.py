"""Check the fields of configs against their annotations."""

import dataclasses
import sys
import types
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .errors import KVPassError

_LARGEST = 2**31 - 1
_SHOWN = 80  # characters of a value shown in a message


def shown(value: Any) -> str:
    """``repr`` of any value, truncated if it is long."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, a list in a list in a list
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_integer(name: str, value: Any, least: int) -> None:
    """Raise `KVPassError` unless ``value`` is an int of at least ``least`` that fits 32 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise KVPassError(f"{name}={shown(value)} must be an integer of at least {least}.")
    if value > _LARGEST:
        raise KVPassError(f"{name}={shown(value)} must be an integer of at most {_LARGEST}.")


def check_integers(config: object, **least: int) -> None:
    """Apply `check_integer` to each named field of ``config``."""
    for name, bound in least.items():
        check_integer(name, getattr(config, name), bound)


def check_fraction(name: str, value: float) -> None:
    """Raise `KVPassError` unless ``value`` is from 0 to 1."""
    if not 0 <= value <= 1:
        raise KVPassError(f"{name}={shown(value)} must be a fraction, in [0, 1].")


def check_types(config: object) -> None:
    """Raise `KVPassError` unless every field of a dataclass matches its annotation. Numbers must be finite; lists,
    which JSON has in place of tuples, become tuples."""
    cls: type = type(config)
    for name, hint in _hints(cls).items():
        value = getattr(config, name)
        fitted = _fitted(value, hint)
        if fitted is _MISFIT:
            raise KVPassError(f"{name} must be {_wanted(hint)}, not {shown(value)}.")
        if fitted is not value:
            object.__setattr__(config, name, fitted)


def made(cls: type, name: str, fields: dict[str, Any]) -> Any:
    """A dataclass instance from the output of `dataclasses.asdict`, for field ``name`` of another dataclass. Raises
    `KVPassError` for unknown field names."""
    known = {field.name: field.default is field.default_factory for field in dataclasses.fields(cls)}
    required = {field for field, needed in known.items() if needed}
    if not required <= set(fields) <= set(known):
        raise KVPassError(
            f"{name} takes the fields {list(known)} and requires {sorted(required)}; got {shown(fields)}."
        )
    return cls(**fields)


def hash_once(config: Any) -> int:
    """``__hash__`` of a frozen dataclass, computed once, for objects that are cache keys in every step."""
    try:
        found: int = config._hash
    except AttributeError:
        vars(config)["_hash"] = found = hash(tuple(fields_alone(config).values()))
    return found


def fields_alone(config: Any) -> dict[str, Any]:
    """``__getstate__`` that leaves the cached hash out, because hashes of strings differ between processes."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


_MISFIT = object()


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _fitted(value: Any, hint: Any) -> Any:
    """``value`` converted to match ``hint``, or `_MISFIT`."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return next((fitted for one in inner if (fitted := _fitted(value, one)) is not _MISFIT), _MISFIT)
    if origin is tuple:
        return _fitted_tuple(value, inner)
    if origin is Literal:
        fits = isinstance(value, str) and value in inner
    elif hint is int:
        fits = isinstance(value, int) and not isinstance(value, bool)
    elif hint is float:
        largest = sys.float_info.max
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and -largest <= value <= largest
    else:
        fits = hint is Any or isinstance(value, origin or hint)
    return value if fits else _MISFIT


def _fitted_tuple(value: Any, inner: tuple[Any, ...]) -> Any:
    if not isinstance(value, (list, tuple)):
        return _MISFIT
    hints = inner[:1] * len(value) if inner[-1:] == (...,) else inner
    fitted = tuple(_fitted(*pair) for pair in zip(value, hints, strict=False))
    return _MISFIT if len(hints) != len(value) or any(one is _MISFIT for one in fitted) else fitted


_WORDS = {int: "an integer", float: "a finite number", str: "a name", bool: "True or False", type(None): "None"}


def _wanted(hint: Any) -> str:
    """What an error message says a field must be."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin in (Union, types.UnionType):
        return " or ".join(_wanted(one) for one in inner)
    if origin is tuple:
        one = _WORDS.get(inner[0], str(inner[0])).split(" ", 1)[-1]
        return f"a list of {one}s" if inner[-1] is Ellipsis else f"a list of {len(inner)} {one}s"
    return _WORDS.get(hint) or str(getattr(origin or hint, "__name__", hint))
