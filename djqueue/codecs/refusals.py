"""The errors of the codecs: where in a value the trouble is, and what to do about it.

The place is looked for only once encoding has failed.
"""

import enum
import os
from collections.abc import Collection, Iterator
from dataclasses import is_dataclass
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from operator import eq
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from djqueue.core.errors import PayloadTooLargeError, SerializationError

CONTAINERS = frozenset({dict, list, tuple})
ALWAYS_FINE = frozenset({type(None), bool, float, bytes, date, timedelta, Decimal, UUID})
SMALLEST, LARGEST = -(2**63), 2**64 - 1
SALTED = frozenset({str, bytes})
"""Types whose hashes differ from process to process, so that no one can choose them."""
MAX_KEYS = 10_000
"""Maximum number of keys of a dict that have other types."""
MAX_EQUAL_HASHES = 64
"""Maximum number of these keys that may have the same hash. The powers of two need 35."""
MAX_DEPTH = 500
"""Levels of lists, tuples and dicts; some versions of MessagePack's C code stop at 511."""
LONGEST_PATH = 200
"""Characters of a path that are shown."""


def refusal(value: Any, what: str, cause: Exception | None = None) -> SerializationError:
    """Return the error about the first part of a value that cannot be encoded."""
    path: list[str] = []
    holders: list[int] = []
    open_parts: list[Iterator[tuple[str, Any]]] = [iter([("", value)])]
    while open_parts:
        step, part = next(open_parts[-1], (None, None))
        if step is None:
            open_parts.pop()
            if holders:
                holders.pop()
                path.pop()
            continue
        trouble = _trouble(part)
        if type(part) in CONTAINERS:
            if id(part) in holders:
                trouble = f"the {type(part).__name__} contains itself"
            elif len(holders) >= MAX_DEPTH:
                trouble = f"nested deeper than {MAX_DEPTH} levels"
        if trouble is not None:
            return SerializationError(f"{what}{_shown(path, step)}: {trouble}")
        if type(part) in CONTAINERS:
            path.append(step)
            holders.append(id(part))
            open_parts.append(_parts(part))
    return SerializationError(f"{what}: cannot be encoded: {cause}")


def content_of(part: Any) -> Any:
    """Return the str or int that a value is besides its type; other values as they are.

    Such are the members of TextChoices, IntegerChoices, StrEnum and IntEnum, and Django's SafeString.
    """
    if isinstance(part, enum.Enum) and isinstance(part, (str, int)):
        return part.value if type(part.value) in (str, int) else part
    kind = type(part)
    if kind.__name__ == "SafeString" and kind.__module__ == "django.utils.safestring":
        return "".join((part,))  # Its `str()` is safe, too.
    return part


def keys_trouble(keys: Collection[Any]) -> str | None:
    """Return the reason why a dict can't have these keys, if filling it could take far too long."""
    if len(keys) <= MAX_EQUAL_HASHES or SALTED.issuperset(map(type, keys)):
        return None
    chosen = [key for key in keys if type(key) not in SALTED]
    if len(chosen) > MAX_KEYS:
        return (
            f"a dict with {len(chosen):,} keys other than str and bytes, more than {MAX_KEYS:,}; "
            "pass str keys or list(….items())"
        )
    # Sorted, because a set of these hashes could take just as long.
    hashes = sorted(map(hash, chosen))
    if any(map(eq, hashes, hashes[MAX_EQUAL_HASHES:])):
        return f"a dict with more than {MAX_EQUAL_HASHES} keys of one hash; pass str keys or list(….items())"
    return None


def too_large(size: int, limit: int, what: str) -> PayloadTooLargeError:
    """Return the error about too many bytes."""
    return PayloadTooLargeError(
        f'{what}: {size} bytes, but DJQUEUE["MAX_PAYLOAD"] allows {limit}; store large data elsewhere and '
        "pass a reference"
    )


def not_accepted(content_type: str, accept: Collection[str]) -> SerializationError:
    """Return the error about a content type that is not known, or not accepted."""
    listed = ", ".join(sorted(accept)) or "none"
    return SerializationError(
        f'content type {content_type!r} is not accepted; DJQUEUE["ACCEPT_CONTENT"] allows: {listed}'
    )


def _parts(container: Any) -> Iterator[tuple[str, Any]]:
    if type(container) is not dict:
        for index, item in enumerate(container):
            yield f"[{index}]", item
        return
    for index, (key, item) in enumerate(container.items()):
        yield f".keys()[{index}]", key
        yield _key_step(key), item


def _key_step(key: Any) -> str:
    if type(key) is str and key.isidentifier():
        return f".{key}"
    return f"[{key!r}]"


def _shown(path: list[str], step: str) -> str:
    text = "".join([*path, step])
    if len(text) <= LONGEST_PATH:
        return text
    half = LONGEST_PATH // 2
    return f"{text[:half]}…{text[-half:]}"


def _trouble(part: Any) -> str | None:
    part = content_of(part)
    kind = type(part)
    if kind is dict:
        return keys_trouble(part)
    if kind in ALWAYS_FINE or kind in CONTAINERS:
        return None
    if kind is str:
        return _text_trouble(part)
    if kind is int:
        fits = SMALLEST <= part <= LARGEST
        return None if fits else "an int of more than 64 bits cannot be encoded; pass str(…)"
    if kind is datetime or kind is time:
        return None if part.tzinfo is None else _zone_trouble(part.tzinfo)
    return f"{_name(kind)} objects cannot be encoded{_remedy(part)}"


def _text_trouble(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"the str has a lone surrogate at {error.start}, which cannot be encoded"
    return None


def _zone_trouble(zone: tzinfo) -> str | None:
    if type(zone) is ZoneInfo and zone.key is not None:
        return None
    if type(zone) is timezone:
        return None if len(arguments := _arguments(zone)) == 1 else _text_trouble(arguments[1])
    return (
        f"its time zone is a {_name(type(zone))}; use zoneinfo.ZoneInfo with a key, datetime.timezone or none"
    )


def _arguments(zone: timezone) -> tuple[Any, ...]:
    """(offset,) or (offset, name)."""
    found: tuple[Any, ...] = zone.__getinitargs__()  # type: ignore[attr-defined]
    return found


def _name(kind: type) -> str:
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return prefix + kind.__qualname__


def _remedy(part: Any) -> str:
    for applies, words in _REMEDIES:
        if applies(part):
            return f"; {words}"
    return ""


def _is_model(part: Any) -> bool:
    return hasattr(type(part), "_meta") and hasattr(type(part), "pk")


def _is_lazy_text(part: Any) -> bool:
    return type(part).__name__ == "__proxy__"


_REMEDIES = (
    (_is_model, "pass its primary key"),
    (lambda part: isinstance(part, enum.Enum), "pass its value"),
    (lambda part: isinstance(part, (set, frozenset)), "pass a sorted list"),
    (lambda part: isinstance(part, (bytearray, memoryview)), "pass bytes(…)"),
    (lambda part: isinstance(part, os.PathLike), "pass str(…)"),
    (
        lambda part: isinstance(part, tuple) and hasattr(part, "_asdict"),
        "pass tuple(…) or _asdict()",
    ),
    (lambda part: is_dataclass(part) and not isinstance(part, type), "pass dataclasses.asdict(…)"),
    (_is_lazy_text, "pass str(…)"),
    # Subclasses may stay what they are under str().
    (lambda part: isinstance(part, str) and type(str(part)) is not str, "pass ''.join(…)"),
    (lambda part: isinstance(part, str), "pass str(…)"),
    (lambda part: isinstance(part, int), "pass int(…)"),
    (lambda part: isinstance(part, float), "pass float(…)"),
    (lambda part: isinstance(part, dict), "pass dict(…)"),
    (lambda part: isinstance(part, list), "pass list(…)"),
    (lambda part: isinstance(part, tuple), "pass tuple(…)"),
    (
        lambda part: isinstance(part, (date, time, timedelta)),
        "pass one of the standard library's type",
    ),
    (lambda part: hasattr(type(part), "tolist"), "pass its tolist()"),
    (lambda part: hasattr(part, "read"), "pass its name, or the bytes that it holds"),
    (lambda part: callable(part), "pass its name"),
    (lambda part: hasattr(type(part), "__iter__"), "pass list(…)"),
)
"""Asked in order; the first that applies says what to pass instead."""
