"""Jobs by a value in their arguments: `order_id:7`, `kwargs.order.id:7`, `args.0:7`.

Only what is shown of a job is compared: nobody finds a job by a value that is hidden from them. Every payload
in question is opened, whatever its bytes are, so that neither the pages nor the time of a search tell whether
a hidden value is the one that was looked for. Such a search is slow, and has a budget: see `scanning`.
"""

import json
from typing import Any, NamedTuple

from djqueue.core.errors import OptionError, SerializationError
from djqueue.core.job import JobRecord

from . import redaction

ROOTS = ("args", "kwargs")


class Argument(NamedTuple):
    """Where a value is, and what it may be: a text may mean a number."""

    path: tuple[str, ...]
    values: tuple[Any, ...]

    def is_in(self, record: JobRecord) -> bool:
        """Whether a job has it, among what is shown of its payload."""
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
    """What a text says; None if it is empty. Raises OptionError."""
    if not text:
        return None
    name, colon, value = text.partition(":")
    path = tuple(name.strip().split("."))
    if not colon or not all(path):
        raise OptionError("argument: write it as name:value, kwargs.order.id:7 or args.0:7")
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
