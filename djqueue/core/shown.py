"""Values in error messages, shortened if they are large."""

from typing import Any

LONGEST = 200
"""Maximum number of characters of a representation in a message."""


def shown(value: Any) -> str:
    """Return the representation of a value, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:
        return f"{type(value).__name__} with too many digits to show"  # Python limits the digits.
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def in_one_line(error: object) -> str:
    """Return the text of an error in one line."""
    return " ".join(str(error).split())
