"""Why a handler is asked to stop."""

from enum import IntEnum


class Stop(IntEnum):
    """Of several reasons the highest counts."""

    NO = 0
    SHUTDOWN = 1
    TIMEOUT = 2
    REQUESTED = 3
    """Somebody cancelled the job."""
    LOST = 4
    """The lease is over: the job may be running elsewhere."""
