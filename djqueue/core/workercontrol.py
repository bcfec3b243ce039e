"""Commands for workers, and which of them count until the worker receives them."""

from .errors import OptionError

QUIET, RESUME, STOP, DUMP = "quiet", "resume", "stop", "dump"
COMMANDS = (QUIET, RESUME, STOP, DUMP)
"""Claim no more jobs, but finish running ones; claim again; stop as after a signal; save the stacks of all
threads.
"""

ASKED, STOPPING, NOT_FOUND = "asked", "stopping", "not_found"
"""Result of a command: the worker will receive it, is stopping already, or is not alive."""

DUMP_TTL = 300_000
"""Milliseconds for which a dump is kept, if its worker lives that long."""
MAX_DUMP = 64 * 1024
"""Maximum number of characters of a dump."""


def check_command(command: str) -> None:
    """Raise OptionError for an unknown command."""
    if command not in COMMANDS:
        raise OptionError(f"command: {command!r} is not one of {', '.join(COMMANDS)}")


def with_command(waiting: tuple[str, ...], command: str) -> tuple[str, ...]:
    """Return the commands that wait for a worker after one more: a dump, and the last of the others."""
    kept = (one for one in waiting if one != command and DUMP in (one, command))
    return (*kept, command)
