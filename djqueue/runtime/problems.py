"""Problems that keep this process from its work, noted by its parts and read by its supervisor."""

from collections.abc import Sequence
from threading import Lock

from djqueue.core.overview import Finding

_lock = Lock()
_noted: dict[str, tuple[Finding, ...]] = {}


def note(part: str, findings: Sequence[Finding]) -> None:
    """Record the problems of a part of this process in place of its former ones. From any thread."""
    with _lock:
        if findings:
            _noted[part] = tuple(findings)
        else:
            _noted.pop(part, None)


def noted() -> list[Finding]:
    """Return the problems of all parts."""
    with _lock:
        return [finding for findings in _noted.values() for finding in findings]
