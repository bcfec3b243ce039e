"""Beats: what a child writes into a pipe once a second, so that its supervisor knows that it still runs.

Each beat is a line of JSON that says whether the child is ready, which problems it has, and whether it
ends as planned.
"""

import json
import os
from collections.abc import Sequence
from threading import Event, Lock
from typing import NamedTuple

from djqueue.core.overview import Finding
from djqueue.core.threads import start_daemon

from .. import problems
from ..exits import FAILED

INTERVAL = 1.0
"""Seconds between two beats."""
MAX_PROBLEMS = 8
"""Maximum problems in a beat."""
MAX_TEXT = 300
"""Maximum characters of each text in a beat."""
MAX_UNREAD = 1 << 16
"""Maximum bytes of a beat that is not complete; a longer one is not one of ours."""


class Beat(NamedTuple):
    """One report of a child."""

    is_ready: bool
    problems: tuple[Finding, ...]
    code: int | None
    """Exit code with which the child is about to end; None before that."""


class BeatWriter:
    """Writes the beats of this process, a child, from a thread. A frozen process writes none."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._number = os.fstat(pipe).st_ino
        self._lock = Lock()
        self._is_ready = False
        self._code: int | None = None

    def start(self) -> None:
        """Start the thread."""
        start_daemon("djqueue-beats", self._serve)

    def ready(self) -> None:
        """Report that the process is ready."""
        self._is_ready = True
        self._write()

    def end(self, code: int) -> None:
        """Report that the process ends as planned, with an exit code."""
        self._code = code
        self._write()

    def _serve(self) -> None:
        pause = Event()
        while True:
            self._write()
            pause.wait(INTERVAL)

    def _write(self) -> None:
        found = problems.noted()[:MAX_PROBLEMS]
        shown = [(one.id, one.text[:MAX_TEXT], one.hint[:MAX_TEXT]) for one in found]
        line = json.dumps([self._is_ready, shown, self._code]) + "\n"
        with self._lock:
            self._check_pipe()
            os.write(self._pipe, line.encode())

    def _check_pipe(self) -> None:
        """End the process if a handler has closed its descriptors: another file may have the pipe's number,
        and other parts lack theirs.
        """
        try:
            is_open = os.fstat(self._pipe).st_ino == self._number
        except OSError:
            is_open = False
        if not is_open:
            os._exit(FAILED)


class BeatReader:
    """Reads the beats of a child."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._unread = b""

    def read(self) -> list[Beat] | None:
        """Return the beats that have arrived; None after the end of the last process that has the pipe."""
        try:
            received = os.read(self._pipe, MAX_UNREAD)
        except BlockingIOError:
            return []
        if not received:
            return None
        *lines, self._unread = (self._unread + received).split(b"\n")
        self._unread = self._unread[-MAX_UNREAD:]
        return [beat for beat in map(_parsed, lines) if beat is not None]


def _parsed(line: bytes) -> Beat | None:
    """Return a beat; None for other bytes, which code of the project may have written to any descriptor."""
    try:
        is_ready, found, code = json.loads(line)
        return Beat(bool(is_ready), _findings(found), code)
    except (ValueError, TypeError):
        return None


def _findings(found: Sequence[Sequence[str]]) -> tuple[Finding, ...]:
    return tuple(Finding(str(id), "error", str(text), str(hint)) for id, text, hint in found)
