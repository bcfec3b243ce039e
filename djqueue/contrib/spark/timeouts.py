"""Time limits of calls to a storage, as options and in URLs."""

from typing import NamedTuple
from urllib.parse import unquote_plus

from djqueue.core.errors import OptionError

from .options import seconds


class Timeouts(NamedTuple):
    """Time limits in seconds; None for those of the storage."""

    call: float | None = None
    """For a call to the storage, or one statement of a database."""
    socket: float | None = None
    """For a connection, and for a reply."""

    def over(self, others: "Timeouts") -> "Timeouts":
        """Return these limits, and the others where these have none."""
        return Timeouts(*(one if one is not None else other for one, other in zip(self, others, strict=True)))


TIMEOUTS = {"timeout": "call", "sockettimeout": "socket"}
"""Fields of `Timeouts` by the normalized names of a URL's parameters."""
NO_TIMEOUTS = Timeouts()


def timeouts_in(url: str) -> tuple[str, Timeouts]:
    """Return a URL without its time limits, and these. Raises OptionError if one is not a number."""
    address, mark, query = url.partition("?")
    values: dict[str, float] = {}
    others = []
    for parameter in query.split("&"):
        name, _, text = parameter.partition("=")
        field = TIMEOUTS.get(name.replace("_", "").lower())
        if field is None:
            others.append(parameter)
            continue
        try:
            values[field] = seconds(name, unquote_plus(text))
        except OptionError as error:
            raise OptionError(f"url: {error}") from None
    rest = "&".join(others)
    return (f"{address}{mark}{rest}" if rest else address), Timeouts(**values)
