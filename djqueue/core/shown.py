"""Values in error messages: short, however large the value is."""

from typing import Any

LONGEST = 200
"""Characters of a representation that a message shows."""


def shown(value: Any) -> str:
    """Return the representation of a value, cut if it is long."""
    try:
        text = repr(value)
    except ValueError:
        return f"{type(value).__name__} with too many digits to show"  # Python limits how many it writes
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def in_one_line(error: object) -> str:
    """Return the text of an error, whose own may have several lines."""
    return " ".join(str(error).split())
