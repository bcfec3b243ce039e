"""The end of processes: exit codes, and the end together with the parent."""

import ctypes
import logging
import os
import signal
import sys
from typing import NoReturn

from django.db import connections

FINISHED, FAILED, MISUSED, RECYCLED, REFUSED, CONFIG = 0, 1, 2, 76, 77, 78
"""Exit codes of a process: it has nothing left to do, it failed and may be restarted, its options are wrong,
it reached a limit and is to be replaced, it can never run beside another process, the system lacks something
that its configuration requires."""
PR_SET_NAME, PR_SET_PDEATHSIG = 15, 1


def leave(code: int) -> NoReturn:
    """Exit the process without the parent's exit handlers, and without waiting for threads of handlers."""
    try:
        connections.close_all()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def end_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent ends, and exit if that has already happened."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(FAILED)


def name_process(name: str) -> None:
    """Name this process in `ps -o comm` and `top`, which show 15 characters."""
    if sys.platform == "linux":
        title = f"dq:{name.replace(' ', '-')}"[:15]
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NAME, title.encode())
