"""Parts of SQL statements."""

from typing import Any


class Statement:
    """A statement of SQLite over any number of rows."""

    __slots__ = ("_head", "_one", "_tail", "_texts")

    def __init__(self, head: str, one: str, tail: str) -> None:
        self._head, self._one, self._tail = head, one, tail
        self._texts: dict[int, str] = {}

    def text(self, size: int) -> str:
        """Return the statement for a number of rows, each time the same string, whose hash Python keeps."""
        text = self._texts.get(size)
        if text is None:
            text = self._texts[size] = f"{self._head}{','.join([self._one] * size)}{self._tail}"
        return text


def literal(value: Any) -> str:
    """Convert a trusted constant to an SQL literal."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str) and (value == "" or (value.isascii() and value.isidentifier())):
        return f"'{value}'"
    raise ValueError(f"no literal for {value!r}")
