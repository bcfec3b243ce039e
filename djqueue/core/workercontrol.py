"""What a worker can be told: the words, and which of them count until it has heard them."""

from .errors import OptionError

QUIET, RESUME, STOP, DUMP = "quiet", "resume", "stop", "dump"
COMMANDS = (QUIET, RESUME, STOP, DUMP)
"""Claim no more, but finish what runs; claim again; end, as after a signal; tell where each thread is."""

ASKED, STOPPING, NOT_FOUND = "asked", "stopping", "not_found"
"""What becomes of a command: the worker will hear it, is to end already, or is not alive."""

DUMP_TTL = 300_000
"""Milliseconds for which a dump is kept, if its worker lives so long."""
MAX_DUMP = 64 * 1024
"""Characters that one may have."""


def check_command(command: str) -> None:
    """Raises OptionError if it is none."""
    if command not in COMMANDS:
        raise OptionError(f"command: {command!r} is not one of {', '.join(COMMANDS)}")


def with_command(waiting: tuple[str, ...], command: str) -> tuple[str, ...]:
    """What a worker is still to hear after one more word: a dump, and the last of the others."""
    kept = (one for one in waiting if one != command and DUMP in (one, command))
    return (*kept, command)
