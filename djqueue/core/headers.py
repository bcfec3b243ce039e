"""Headers of a job: a small mapping that is carried with the job, beside its payload.

They are stored as one JSON text. MessagePack maps would lose empty lists, nulls and large integers in the Lua
scripts that rewrite the options of a job.
"""

import json
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from .errors import OptionError, SerializationError
from .messages import kind_of, shown

MAX_HEADERS = 64
MAX_NAME = 255
"""Maximum number of characters of a header's name."""
MAX_BYTES = 8 * 1024
"""Maximum size of a job's headers, as JSON in UTF-8."""
MAX_DEPTH = 8
"""Maximum nesting of lists and dicts in the value of a header."""
INTEGERS = range(-(2**63), 2**63)


class Headers(Mapping[str, Any]):
    """Headers of a job, in order. Immutable, and equal if their JSON is equal, so that 1 is not True.

    Reading them raises SerializationError if the stored text is malformed.
    """

    __slots__ = ("_values", "text")

    def __init__(self, text: str = "") -> None:
        self.text = text
        """The headers as JSON; empty if there are none."""
        self._values: dict[str, Any] | None = None

    def __getitem__(self, name: str) -> Any:
        value = self._decoded()[name]
        # The jobs of a batch share one object, so a caller gets its own lists and dicts.
        return deepcopy(value) if isinstance(value, (list, dict)) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    def __len__(self) -> int:
        return len(self._decoded()) if self.text else 0

    def __bool__(self) -> bool:
        return bool(self.text)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Headers):
            return self.text == other.text
        return isinstance(other, Mapping) and self._decoded() == dict(other)

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        # Values may be secret, and a repr gets into logs and error reports.
        return f"<Headers: {', '.join(map(repr, self))}>" if self else "<Headers>"

    def __reduce__(self) -> tuple[type["Headers"], tuple[str]]:
        return Headers, (self.text,)

    def merged(self, other: Mapping[str, Any]) -> "Headers":
        """Return these headers with others added; one of the same name replaces the value here.

        Raises OptionError if a header is invalid, or all of them together exceed the limits.
        """
        return parse_headers("headers", {**self._decoded(), **other})

    def _decoded(self) -> dict[str, Any]:
        if self._values is None:
            self._values = _read(self.text) if self.text else {}
        return self._values


def _read(text: Any) -> dict[str, Any]:
    """Decode stored headers, which another program may have written."""
    try:
        values = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise SerializationError(f"headers: not JSON: {shown(text)}") from error
    if not isinstance(values, dict):
        raise SerializationError(f"headers: expected a JSON object, got {kind_of(values)}")
    return values


NO_HEADERS = Headers()


def parse_headers(option: str, value: Any) -> Headers:
    """Check headers. Raises OptionError with the name of the header."""
    if isinstance(value, Headers):
        return value
    if not isinstance(value, Mapping):
        raise OptionError(f"{option}: expected a dict of names and values, got {kind_of(value)}")
    if len(value) > MAX_HEADERS:
        raise OptionError(f"{option}: a job may have at most {MAX_HEADERS} headers; got {len(value):,}")
    budget = _Budget(option)
    plain = {_name(option, name): budget.plain(name, part, 1) for name, part in value.items()}
    if not plain:
        return NO_HEADERS
    text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if len(text.encode()) > MAX_BYTES:
        raise _too_large(option, max(plain, key=lambda name: len(json.dumps(plain[name]))))
    return Headers(text)


class _Budget:
    """Copies values, and stops at the first that makes the headers too large, as one that contains itself."""

    def __init__(self, option: str) -> None:
        self._option = option
        self._left = MAX_BYTES

    def plain(self, name: str, value: Any, depth: int) -> Any:
        """Return a copy of a header's value of JSON types only."""
        self._left -= 1
        if self._left < 0:
            raise _too_large(self._option, name)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._text(name, value)
        if isinstance(value, int):
            if value not in INTEGERS:
                raise OptionError(
                    f"{self._option}: the value of {shown(name)} has an integer of more than 64 bits; pass "
                    "it as a string"
                )
            return int(value)
        if isinstance(value, float):
            if not math.isfinite(value):
                raise OptionError(
                    f"{self._option}: the value of {shown(name)} has the number {value!r}, which JSON does "
                    "not have; pass None or a string"
                )
            return float(value)
        if isinstance(value, (list, tuple, Mapping)):
            return self._nested(name, value, depth)
        raise OptionError(
            f"{self._option}: the value of {shown(name)} must be a string, number, boolean, None, or a list "
            f"or dict of these; got {kind_of(value)}"
        )

    def _nested(self, name: str, value: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise OptionError(
                f"{self._option}: the value of {shown(name)} is nested more than {MAX_DEPTH} levels deep"
            )
        if not isinstance(value, Mapping):
            return [self.plain(name, part, depth + 1) for part in value]
        for key in value:
            if not isinstance(key, str):
                raise OptionError(
                    f"{self._option}: the value of {shown(name)} has the key {shown(key)}; keys must be "
                    "strings"
                )
        return {self._text(name, key): self.plain(name, part, depth + 1) for key, part in value.items()}

    def _text(self, name: str, value: str) -> str:
        self._left -= len(value)
        if self._left < 0:
            raise _too_large(self._option, name)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise OptionError(f"{self._option}: the value of {shown(name)} is not valid Unicode") from None
        return str(value)


def _name(option: str, name: Any) -> str:
    if not isinstance(name, str):
        raise OptionError(f"{option}: a header's name must be a string; got {shown(name)}")
    if not 1 <= len(name) <= MAX_NAME:
        raise OptionError(
            f"{option}: a header's name must have 1 to {MAX_NAME} characters; got {shown(name)}"
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise OptionError(f"{option}: the name {shown(name)} is not valid Unicode") from None
    return str(name)


def _too_large(option: str, name: str) -> OptionError:
    return OptionError(
        f"{option}: {shown(name)} makes the headers of the job larger than {MAX_BYTES:,} bytes as JSON; put "
        "large values into the payload"
    )
