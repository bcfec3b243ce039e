"""What the demo's commands have in common at a terminal."""

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

VAR = "DJQUEUE_DEMO_VAR"
"""The environment variable that says where everything lies that the demo writes."""


def end_with(main: Callable[[], int]) -> NoReturn:
    """Run a command and end with its exit code: 130 after Ctrl-C or SIGTERM, which end its children, too."""
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell has it ignore Ctrl-C
        signal.signal(number, interrupt)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nThe demo has ended.")
        sys.exit(130)


def interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
