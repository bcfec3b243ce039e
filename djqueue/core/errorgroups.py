"""Errors of failed attempts, counted by what they have in common until maintenance stores them."""

import os
import re
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from .clock import SYSTEM_CLOCK
from .job import JobFailure
from .logs import storable

FINGERPRINT_LENGTH = 500
"""Characters of the message that count for its fingerprint."""
VARIABLE = re.compile(
    r"""
    (?<![\w+.-])[+.-]*+\w[\w+.-]*+://\S+ | (?<!\S)\S+@\S+ | (?<=['"])[^\s'"]+@\S+
    | (?<!\w)(?:'[^']*'|"[^"]*")(?!\w) | (?<![\w-])[\w-]*\d[\w.:-]* | \b[a-f]{8,}\b
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Parts in which messages of the same error differ: URLs, addresses, quoted texts, ids, numbers.

Each begins at the start of a word, so that a message is searched once.
"""
FRAME = re.compile(r'^ +(?:\| +)*File "([^"\n]+)", line \d+, in (\S+)', re.MULTILINE)
"""A frame of a traceback: its file and its function."""
FOREIGN = re.compile(r"[/\\](?:site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]|^<|^/usr/lib/")
"""Files of Python and of installed packages."""
PACKAGE = str(Path(__file__).parent.parent) + os.sep
"""Folder of djqueue."""
MARK_SIZE = 6
"""Bytes of a fingerprint, which has twice as many characters."""
MAX_FINGERPRINTS = 50
"""Messages of one place that a group takes in; other messages have groups of their own."""
MAX_PENDING = 1_000
"""Different errors that wait to be stored; others are not counted."""


class ErrorKey(NamedTuple):
    """The common properties of the failed attempts of one sighting."""

    queue: str
    name: str
    """The job's name."""
    error_type: str
    place: str
    """Last own frame of the traceback, such as `shop/jobs.py:charge`; empty if there is none."""
    fingerprint: str
    version: str
    """Version of the project that the worker ran; empty if unknown."""


class Sighting(NamedTuple):
    """An error, and how often it was seen lately."""

    key: ErrorKey
    attempts: int
    jobs: int
    """Attempts after which the job failed for good."""
    first: int
    """UTC milliseconds, as `last`."""
    last: int
    message: str
    """The newest message."""


def masked(message: str) -> str:
    """Return the first line of a message with `#` for everything that differs from job to job."""
    return VARIABLE.sub("#", message[:FINGERPRINT_LENGTH].partition("\n")[0])


def fingerprint_of(error_type: str, name: str, message: str) -> str:
    """Return a hash that is equal for errors of the same type and job name, even if numbers, ids, quoted
    texts or URLs in the message differ.
    """
    data = f"{error_type}\0{name}\0{masked(message)}".encode(errors="surrogatepass")
    return blake2b(data, digest_size=MARK_SIZE).hexdigest()


def place_of(traceback: str) -> str:
    """Return the last frame of the project's own code, as file and function; empty if there is none."""
    for file, function in reversed(FRAME.findall(traceback)):
        if not FOREIGN.search(file) and not file.startswith(PACKAGE):
            path = "/".join(file.replace("\\", "/").split("/")[-2:])
            return f"{path}:{function}"
    return ""


class ErrorTally:
    """Counts the errors of this process until they are stored. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.is_stored = False
        """Whether this process stores them; otherwise nothing is counted."""
        self._lock = Lock()
        self._pending: dict[ErrorKey, Sighting] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def add(
        self,
        queue: str,
        name: str,
        error: JobFailure | None,
        *,
        version: str = "",
        reason: str = "",
        is_final: bool,
    ) -> None:
        """Count a failed attempt.

        Args:
            is_final: Whether the job failed for good.
            reason: Reason of the failure, shown if there is no message.
        """
        if not self.is_stored:
            return
        type_, message, traceback = error or JobFailure("", "")
        mark = fingerprint_of(type_, name, message)
        # A text that the database rejects would keep all others from being stored.
        texts = (storable(text) for text in (queue, name, type_, place_of(traceback), mark, version))
        shown, now = storable((message or reason)[:FINGERPRINT_LENGTH]), SYSTEM_CLOCK.now()
        self.put_back([Sighting(ErrorKey(*texts), 1, int(is_final), now, now, shown)])

    def take(self, limit: int) -> list[Sighting]:
        """Return up to `limit` errors, and forget them."""
        with self._lock:
            keys = list(self._pending)[:limit]
            return [self._pending.pop(key) for key in keys]

    def put_back(self, sightings: Sequence[Sighting]) -> None:
        """Count errors again that could not be stored."""
        with self._lock:
            for one in sightings:
                known = self._pending.get(one.key)
                if known is None:
                    if len(self._pending) < MAX_PENDING:
                        self._pending[one.key] = one
                    continue
                newest = one if one.last >= known.last else known
                self._pending[one.key] = Sighting(
                    one.key,
                    known.attempts + one.attempts,
                    known.jobs + one.jobs,
                    min(known.first, one.first),
                    newest.last,
                    newest.message,
                )


tally = ErrorTally()
"""The errors of this process."""
