"""Converts values to JSON that users edit, and back, without loss.

Types beyond JSON are objects with one key: `{"$bytes": "aGk="}`, `{"$date": "2026-06-01"}`. Hidden values are
numbered placeholders, each valid only in its original place.
"""

import json
import math
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

from django.utils.translation import gettext as _

from djqueue.dashboard.redaction import HIDDEN, MAX_DEPTH, Hidden

MAX_LENGTH = 100_000
"""Maximum characters that can be edited."""
PLACEHOLDER = re.compile(rf"{HIDDEN}\d+")
SURROGATE = re.compile("[\ud800-\udfff]")
Path = tuple[str | int, ...]
_WRITTEN: dict[type, Callable[[Any], Any]] = {
    bytes: lambda value: {"$bytes": b64encode(value).decode()},
    datetime: lambda value: {"$datetime": value.isoformat()},
    date: lambda value: {"$date": value.isoformat()},
    time: lambda value: {"$time": value.isoformat()},
    timedelta: lambda value: {"$timedelta": [value.days, value.seconds, value.microseconds]},
    Decimal: lambda value: {"$decimal": str(value)},
    UUID: lambda value: {"$uuid": str(value)},
}
ARGUMENTS = ("args", "kwargs")


class NotEditableError(ValueError):
    """The value can't be represented as JSON without loss. The message says which part, and why."""


class MalformedError(ValueError):
    """The text is not a valid value. The message says why."""


class Draft(NamedTuple):
    """A value prepared for editing."""

    text: str
    hidden: Mapping[str, tuple[Path, Any]]
    """Path and value of each placeholder in the text."""


def _tuple(parts: Any) -> tuple[Any, ...]:
    if not isinstance(parts, list):
        raise TypeError("a list is expected")
    return tuple(parts)


_READ: dict[str, Callable[[Any], Any]] = {
    "$bytes": lambda text: b64decode(text, validate=True),
    "$datetime": datetime.fromisoformat,
    "$date": date.fromisoformat,
    "$time": time.fromisoformat,
    "$timedelta": lambda parts: timedelta(*_tuple(parts)),
    "$decimal": Decimal,
    "$uuid": lambda text: UUID(str(text)),
    "$tuple": _tuple,
}


def write(value: Any, shown: Any, path: Path = (), *, tagged: bool = True) -> Draft:
    """Return a value as JSON, with placeholders for the parts that differ from `shown`.

    Args:
        shown: The value as the user may see it.
        path: Path of the value in the whole payload.
        tagged: Whether an object with one key such as `$date` stands for a type beyond JSON. If not, it is a
        plain object, as in a column of JSON.

    Raises:
        NotEditableError: The value can't be represented.
    """
    hidden: dict[str, tuple[Path, Any]] = {}
    plain = _plain(value, shown, path, hidden, 0, tagged=tagged)
    text = json.dumps(plain, ensure_ascii=False, indent=2)
    if len(text) > MAX_LENGTH:
        raise NotEditableError(_("the value has more than 100,000 characters"))
    draft = Draft(text, hidden)
    if repr(read(text, draft.hidden, path, tagged=tagged)) != repr(value):
        raise NotEditableError(_("the value doesn't survive a round trip through JSON"))
    return draft


def hidden_whole(value: Any, path: Path) -> Draft:
    """Return one placeholder for a value that is completely hidden."""
    placeholder = f"{HIDDEN}1"
    return Draft(json.dumps(placeholder, ensure_ascii=False), {placeholder: (path, value)})


def read(text: str, hidden: Mapping[str, tuple[Path, Any]], path: Path = (), *, tagged: bool = True) -> Any:
    """Return the value of a text.

    Raises:
        MalformedError: The text is not valid.
    """
    if len(text) > MAX_LENGTH:
        raise MalformedError(_("Enter at most 100,000 characters."))
    try:
        plain = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
        return _value(plain, hidden, path, 0, tagged=tagged)
    except json.JSONDecodeError as error:
        message = _("Invalid JSON at line %(line)d, column %(column)d.")
        raise MalformedError(message % {"line": error.lineno, "column": error.colno}) from None
    except RecursionError:
        raise MalformedError(_("The value is nested too deeply.")) from None
    except MalformedError:
        raise
    except ValueError:
        raise MalformedError(_("A number has too many digits.")) from None


def placeholders(text: str) -> set[str]:
    """Return the placeholders of hidden values in a text that `read` accepts."""
    marks, parts = set(), [json.loads(text)]
    for part in parts:
        if isinstance(part, str) and PLACEHOLDER.fullmatch(part):
            marks.add(part)
        elif isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            parts += part.values()
    return marks


def uncovers(before: Any, now: Any, drafts: Mapping[str, Draft], kept: Mapping[str, Collection[str]]) -> bool:
    """Return whether a hidden value that is kept would be visible.

    Args:
        before: The whole payload as the user sees it.
        now: The edited payload as the user would see it.
        kept: Placeholders in the edited text of each draft.
    """
    return any(
        mark in kept[name] and not _is_as_hidden(_at(now, path), _at(before, path))
        for name, draft in drafts.items()
        for mark, (path, _value) in draft.hidden.items()
    )


def _plain(
    value: Any, shown: Any, path: Path, hidden: dict[str, tuple[Path, Any]], level: int, *, tagged: bool
) -> Any:
    if isinstance(shown, Hidden) or not _is_seen(value, shown):
        placeholder = f"{HIDDEN}{len(hidden) + 1}"
        hidden[placeholder] = path, value
        return placeholder
    if level > MAX_DEPTH:
        raise NotEditableError(_("the value is nested too deeply"))
    kind = type(value)
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise _refused(path, _("JSON object keys must be strings; got %s") % repr(key))
        if tagged and len(value) == 1 and next(iter(value)) in _READ:
            raise _refused(path, _("the value looks like a placeholder of this form"))
        return {
            key: _plain(part, shown[key], (*path, key), hidden, level + 1, tagged=tagged)
            for key, part in value.items()
        }
    if kind is list or kind is tuple:
        parts = [
            _plain(part, shown[index], (*path, index), hidden, level + 1, tagged=tagged)
            for index, part in enumerate(value)
        ]
        return parts if kind is list else {"$tuple": parts}
    if kind is str and PLACEHOLDER.fullmatch(value):
        raise _refused(path, _("the value looks like a placeholder of this form"))
    if kind is float and not math.isfinite(value):
        raise _refused(path, _("JSON can't represent %s") % value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in _WRITTEN:
        return _WRITTEN[kind](value)
    raise _refused(path, _("JSON can't represent %s") % kind.__qualname__)


def _is_seen(value: Any, shown: Any) -> bool:
    """Return whether a part itself is visible, apart from its own parts."""
    if isinstance(value, dict):
        return isinstance(shown, dict) and value.keys() == shown.keys()
    if isinstance(value, (list, tuple)):
        return isinstance(shown, (list, tuple)) and len(value) == len(shown)
    return type(value) is type(shown) and repr(value) == repr(shown)


def _value(
    plain: Any, hidden: Mapping[str, tuple[Path, Any]], path: Path, level: int, *, tagged: bool
) -> Any:
    if level > 2 * MAX_DEPTH:
        raise MalformedError(_("The value is nested too deeply."))
    if isinstance(plain, str):
        _check_text(plain)
    if isinstance(plain, str) and PLACEHOLDER.fullmatch(plain):
        original, value = hidden.get(plain, (None, None))
        if original != path:
            message = _(
                "%(mark)s stands for a hidden value only in its original place. Enter a value instead."
            )
            raise MalformedError(message % {"mark": plain})
        return value
    if isinstance(plain, list):
        return [
            _value(part, hidden, (*path, index), level + 1, tagged=tagged) for index, part in enumerate(plain)
        ]
    if not isinstance(plain, dict):
        return plain
    for key in plain:
        _check_text(key)
    word, *others = [*plain, ""]
    if tagged and word in _READ and others == [""]:
        inner = plain[word]
        if word == "$tuple":
            inner = _value(inner, hidden, path, level + 1, tagged=tagged)
        try:
            return _READ[word](inner)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise MalformedError(_("%(word)s: %(error)s") % {"word": word, "error": error}) from None
    return {key: _value(part, hidden, (*path, key), level + 1, tagged=tagged) for key, part in plain.items()}


def _check_text(text: str) -> None:
    if SURROGATE.search(text):
        raise MalformedError(_("A string contains an unpaired surrogate."))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _value in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise MalformedError(_("Duplicate key: %(key)s.") % {"key": json.dumps(twice)})
    return value


def _constant(word: str) -> Any:
    raise MalformedError(_("JSON can't represent %s") % word)


def _refused(path: Path, why: str) -> NotEditableError:
    return NotEditableError(f"{''.join(_steps(path))}: {why}" if path else why)


def _steps(path: Path) -> Iterator[str]:
    for index, step in enumerate(path):
        yield f"[{step}]" if isinstance(step, int) else f".{step}" if index else str(step)


def _at(shown: Any, path: Path) -> Any:
    for step in path:
        if isinstance(shown, Hidden):
            break
        try:
            shown = shown[step]
        except (KeyError, IndexError, TypeError):
            return Hidden()
    return shown


def _is_as_hidden(now: Any, before: Any) -> bool:
    return isinstance(now, Hidden) or repr(now) == repr(before)
