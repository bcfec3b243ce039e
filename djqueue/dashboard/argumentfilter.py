"""Filter jobs by a value of their arguments: `order_id:7`, `kwargs.order.id:7`, `args.0:7`.

Only the visible part of a payload is compared, so hidden values can't be found. Every candidate payload is
decoded, whatever its bytes are, so that neither the results nor the duration of a search reveal a hidden
value. Searches are therefore slow and have a budget: see `payloadscan`.
"""

import json
from typing import Any, NamedTuple

from djqueue.core.errors import OptionError, SerializationError
from djqueue.core.job import JobRecord

from . import redaction

ROOTS = ("args", "kwargs")


class Argument(NamedTuple):
    """A path into the arguments, and the values that match: a text may also mean a number."""

    path: tuple[str, ...]
    values: tuple[Any, ...]

    def is_in(self, record: JobRecord) -> bool:
        """Return whether the visible payload of a job has a matching value."""
        try:
            found = redaction.payload(record, revealed=False)
        except SerializationError:
            return False
        for step in self.path:
            if isinstance(found, dict):
                found = found.get(step)
            elif isinstance(found, (list, tuple)) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            else:
                return False
        return any(type(found) is type(value) and found == value for value in self.values)


def read(text: str) -> Argument | None:
    """Parse a filter; None if the text is empty.

    Raises:
        OptionError: The text is not valid.
    """
    if not text:
        return None
    name, colon, value = text.partition(":")
    path = tuple(name.strip().split("."))
    if not colon or not all(path):
        raise OptionError("argument: use the form name:value, kwargs.order.id:7 or args.0:7")
    if path[0] not in ROOTS:
        path = ("kwargs", *path)
    value = value.strip()
    return Argument(path, tuple(_meant(value)))


def _meant(text: str) -> list[Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    plain = value is None or isinstance(value, (str, int, float))
    return [value, text] if plain and value != text else [text]
