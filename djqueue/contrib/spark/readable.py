"""Convert payloads and results to JSON text, or to the types of a schema that the user gives."""

import json
import logging
import math
from base64 import b64encode
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Context, Decimal, InvalidOperation
from functools import partial
from typing import TYPE_CHECKING, Any

from djqueue.codecs import PLAIN, decode
from djqueue.core.errors import OptionError, SerializationError
from djqueue.storage.export import Page

if TYPE_CHECKING:
    from pyarrow import DataType

logger = logging.getLogger("djqueue.spark")

JSON_TYPES = frozenset({"application/json", "json"})
LISTS = (list, tuple, set, frozenset)
ROUNDING = Context(prec=100, traps=[InvalidOperation])
"""Has more digits than Spark's decimals, which have at most 38."""
Fit = Callable[[Any], Any]
"""Converts a value to a type. Raises Misfit."""


class Misfit(ValueError):
    """A value can't be converted to the type that the schema has for it."""


class ReadableColumns:
    """Convert columns of encoded values, and count the values that can't be converted, which become null.

    Args:
        kinds: The Arrow type of each column; None for JSON text.

    Raises:
        OptionError: A type is not supported.
    """

    def __init__(self, kinds: "Mapping[str, DataType | None]") -> None:
        self._problems: list[str] = []
        """Why parts of the current value are null."""
        self._converters: dict[str, Fit] = {
            name: json_of if kind is None else self._fit(kind, f"{name}Schema")
            for name, kind in kinds.items()
        }
        self._failed = dict.fromkeys(kinds, 0)
        self._first: dict[str, str] = {}

    def convert(self, page: Page) -> Page:
        """Return a page with its encoded values converted. It must have their `content_type`."""
        converted = dict(page)
        for name, convert in self._converters.items():
            if (encoded := page.get(name)) is not None:
                kinds = page["content_type"]
                converted[name] = values = []
                for index, (data, kind) in enumerate(zip(encoded, kinds, strict=True)):
                    values.append(None if data is None else self._converted(convert, data, kind))
                    if self._problems:
                        job = f"job {page['id'][index]} of queue {page['queue'][index]}"
                        self._count_problem(name, job)
        return converted

    def _converted(self, convert: Fit, data: bytes, content_type: str) -> Any:
        try:
            value = decoded(data, content_type)
            return None if value is None else convert(value)
        except (Misfit, SerializationError) as error:
            self._problems.append(str(error))
            return None

    def _count_problem(self, name: str, job: str) -> None:
        self._failed[name] += 1
        self._first.setdefault(name, f"{job}: {self._problems[0]}")
        self._problems.clear()

    def warn(self) -> None:
        """Log how many values could not be converted."""
        for name, first in self._first.items():
            logger.warning(
                "%d values of column %s are null, or parts of them, because they could not be converted; the "
                "first is that of %s",
                self._failed[name],
                name,
                first,
            )

    def _fit(self, kind: "DataType", option: str) -> Fit:
        """Return a function that converts a value, and those of its parts that can be converted."""
        from pyarrow import types

        if types.is_struct(kind):
            fields = [kind.field(index) for index in range(kind.num_fields)]
            parts = {field.name: self._part(field.type, option) for field in fields}
            return lambda value: {
                name: fit(_instance(value, Mapping, "object").get(name)) for name, fit in parts.items()
            }
        if types.is_map(kind):
            fit_key, fit_item = self._fit(kind.key_type, option), self._part(kind.item_type, option)
            return lambda value: [
                (fit_key(key), fit_item(item)) for key, item in _instance(value, Mapping, "object").items()
            ]
        if types.is_list(kind):
            fit_item = self._part(kind.value_type, option)
            return lambda value: list(map(fit_item, _instance(value, LISTS, "array")))
        for is_kind, fit in FITS.items():
            if getattr(types, is_kind)(kind):
                return partial(fit, kind)
        raise OptionError(f"{option}: values can't be read as {kind}: use string")

    def _part(self, kind: "DataType", option: str) -> Fit:
        """Like `_fit`, but a part that can't be converted is null, as is one that is missing."""
        fit = self._fit(kind, option)

        def fit_or_null(value: Any) -> Any:
            try:
                return None if value is None else fit(value)
            except Misfit as error:
                self._problems.append(str(error))
                return None

        return fit_or_null


def decoded(data: bytes, content_type: str) -> Any:
    """Return a decoded value. Raises SerializationError."""
    try:
        if content_type in JSON_TYPES:  # Executors may lack kombu, which has the codec.
            return json.loads(data)
        return decode(data, content_type, accept=PLAIN)
    except ImportError as error:
        raise SerializationError(f"the content type {content_type} can't be decoded here: {error}") from None
    except (ValueError, RecursionError) as error:
        raise SerializationError(f"not a value encoded as {content_type}: {error}") from None


def as_json(data: bytes | None, content_type: str) -> str | None:
    """Return an encoded value as JSON, or None if there is none, or if it can't be decoded."""
    try:
        return None if data is None else json_of(decoded(data, content_type))
    except (Misfit, SerializationError):
        return None


def json_of(value: Any) -> str:
    """Return a value as JSON text, which Spark's `from_json` reads.

    Times are in ISO 8601, bytes in Base64, and other values that JSON lacks are text.

    Raises:
        Misfit: The value is nested too deeply.
    """
    try:
        try:
            return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
        except (ValueError, TypeError):  # It has a NaN, or a key that is no string.
            return json.dumps(_plain(value), ensure_ascii=False)
    except RecursionError:
        raise Misfit("the value is nested too deeply") from None


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, LISTS):
        return [_plain(each) for each in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return b64encode(bytes(value)).decode()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return str(value)


def _instance(value: Any, kinds: Any, expected: str) -> Any:
    if not isinstance(value, kinds):
        raise _misfit(value, expected)
    return value


def _misfit(value: Any, expected: str) -> Misfit:
    return Misfit(f"expected {expected}, got {type(value).__name__}")


def _string(_kind: "DataType", value: Any) -> str:
    if isinstance(value, str):
        return value
    plain = _plain(value)
    return plain if isinstance(plain, str) else json_of(value)


def _boolean(_kind: "DataType", value: Any) -> Any:
    return _instance(value, bool, "true or false")


def _binary(_kind: "DataType", value: Any) -> Any:
    return _instance(value, bytes, "bytes")


def _number(kind: "DataType", value: Any) -> Any:
    if isinstance(value, bool):
        raise _misfit(value, f"a number of type {kind}")
    if isinstance(value, Decimal) and not value.is_finite():
        return float(value)
    return _instance(value, (int, float, Decimal), f"a number of type {kind}")


def _integer(kind: "DataType", value: Any) -> int:
    number, limit = _number(kind, value), 1 << kind.bit_width - 1
    if not -limit <= number < limit or number != int(number):
        raise Misfit(f"the number is not a whole number of type {kind}")
    return int(number)


def _float(kind: "DataType", value: Any) -> float:
    try:
        return float(_number(kind, value))
    except OverflowError:
        raise Misfit(f"the number is too large for the type {kind}") from None


def _decimal(kind: "DataType", value: Any) -> Decimal:
    try:
        number = Decimal(str(_number(kind, value)))
        if not number.is_finite():
            raise InvalidOperation
        scaled = number.quantize(Decimal(1).scaleb(-kind.scale), context=ROUNDING)
    except InvalidOperation:
        raise Misfit(f"the number is too large for the type {kind}") from None
    if scaled and scaled.adjusted() >= kind.precision - kind.scale:
        raise Misfit(f"the number is too large for the type {kind}")
    return scaled


def _date(_kind: "DataType", value: Any) -> date:
    found = _from_text(datetime, value)
    return found.date() if isinstance(found, datetime) else _instance(found, date, "a date")


def _timestamp(kind: "DataType", value: Any) -> datetime:
    found = _from_text(datetime, value)
    if not isinstance(found, datetime):
        found = datetime.combine(_instance(found, date, "a time"), time())
    try:
        at = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except OverflowError:
        raise Misfit("the year of the time is not from 1 to 9999 in UTC") from None
    return at if kind.tz is not None else at.replace(tzinfo=None)


def _time(_kind: "DataType", value: Any) -> time:
    found: time = _instance(_from_text(time, value), time, "a time of day")
    return found


def _duration(_kind: "DataType", value: Any) -> Any:
    return _instance(value, timedelta, "an interval")


def _from_text(kind: type[datetime] | type[time], value: Any) -> Any:
    try:
        return kind.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        raise Misfit(f"the text is no {kind.__name__} in ISO 8601") from None


FITS: Mapping[str, Callable[["DataType", Any], Any]] = {
    "is_string": _string,
    "is_boolean": _boolean,
    "is_binary": _binary,
    "is_integer": _integer,
    "is_floating": _float,
    "is_decimal": _decimal,
    "is_date": _date,
    "is_timestamp": _timestamp,
    "is_time": _time,
    "is_duration": _duration,
}
"""Conversions to the types without parts, by the function of `pyarrow.types` that recognizes them."""
