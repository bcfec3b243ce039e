"""The output of a job: its beginning and its end, as log lines without control characters."""

from collections.abc import Iterator

from djqueue.runtime.reports import MAX_LINE

MOST_LINES = 400
"""Maximum of log lines of one job's output: half from its beginning, half from its end."""
KEPT_AS_IS = frozenset("\t")
"""Control characters that cannot change how a terminal or a page shows the rest."""


class JobOutput:
    """Collects the bytes of one job, of which it keeps the first and the last.

    limit: Bytes to keep.
    """

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes) -> None:
        """Add what was written."""
        self._total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 2 * self._half:
                del self._tail[: len(self._tail) - self._half]

    def lines(self) -> list[str]:
        """Return the output as lines; one of them says how much is left out."""
        tail = self._tail[max(0, len(self._tail) - self._half) :]
        dropped = self._total - len(self._head) - len(tail)
        if not dropped:
            found = _lines(self._head + tail)
            cut = len(found) - MOST_LINES
            if cut <= 0:
                return found
            half = MOST_LINES // 2
            return [*found[:half], f"... {cut:,} lines left out ...", *found[-half:]]
        half = MOST_LINES // 2
        return [*_lines(self._head)[:half], f"... {dropped:,} bytes left out ...", *_lines(tail)[-half:]]

    def text(self) -> str:
        """Return the end of the output, for the error of a job whose process died."""
        return "\n".join(self.lines()[-MOST_LINES // 2 :])


def _lines(data: bytearray) -> list[str]:
    return [inert(line)[:MAX_LINE] for line in _split(data.decode("utf-8", "backslashreplace"))]


def _split(text: str) -> Iterator[str]:
    lines = text.replace("\r\n", "\n").split("\n")
    return (line for line in lines if line)


def inert(text: str) -> str:
    """Return text whose control characters, such as those of terminal escapes, are visible."""
    if text.isprintable():
        return text
    return "".join(c if c in KEPT_AS_IS or c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
