"""Outcomes that a process sent: nothing in them is trusted before it is checked."""

from typing import Any

from djqueue.core.job import JobFailure, Outcome
from djqueue.core.options import MSGPACK
from djqueue.core.units import LONGEST
from djqueue.runtime.runs import Run
from djqueue.runtime.tracebacks import MAX_MESSAGE, MAX_TRACEBACK, clean

from . import frames

PARTS = ("kind", "result", "delay", "error", "reason")
SAFE_CONTENT = frozenset({MSGPACK, "application/json"})
"""Content types whose payloads and results cannot run code in the process that reads them."""
KINDS = frozenset({"complete", "retry", "release", "fail", "cancel"})


def read_outcome(run: Run, largest: int, *sent: Any) -> Outcome:
    """Return the outcome that a process sent for its job. Raises FrameError if it is none.

    largest: Maximum bytes of a result.
    """
    if len(sent) != len(PARTS):
        raise frames.FrameError("it sent an outcome with missing parts")
    kind, result, delay, error, reason = sent
    if kind not in KINDS:
        raise frames.FrameError("it sent an unknown outcome")
    if kind == "complete":
        if len(checked(result, bytes)) > largest:
            raise frames.FrameError(f"it sent a result of more than {largest:,} bytes")
    elif result is not None:
        raise frames.FrameError("it sent a result of a job that did not complete")
    if not 0 <= checked(delay, int) <= LONGEST:
        raise frames.FrameError("it sent a delay that is out of range")
    described = None
    if error is not None:
        name, message, traceback = (checked(text, str) for text in error)
        described = JobFailure(
            clean(name, MAX_MESSAGE), clean(message, MAX_MESSAGE), clean(traceback, MAX_TRACEBACK)
        )
    claimed = run.claimed
    text = clean(checked(reason, str), 100)
    return Outcome(claimed.queue, claimed.id, claimed.token, kind, result, delay, described, text)


def checked(value: Any, kind: type) -> Any:
    """Return a value of exactly this type. Raises FrameError for any other."""
    if type(value) is not kind:
        raise frames.FrameError(f"it sent a value of type {type(value).__name__}, not {kind.__name__}")
    return value
