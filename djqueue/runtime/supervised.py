"""The supervisor of this process, which workers show in the storage's list of workers."""

import os

_supervisor: int | None = None


def note_supervisor(pid: int) -> None:
    """Store the process ID of the supervisor that forked this process."""
    global _supervisor
    _supervisor = pid


def supervisor() -> int | None:
    """Return the process ID of this process's supervisor; None if it has none."""
    # A fork of a child, such as a pool's process, has another parent.
    return _supervisor if _supervisor == os.getppid() else None
