"""Declares the subcommands of `manage.py djqueue`, and writes and records their results."""

import getpass
import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol, TextIO

from django.core.management.base import CommandError
from django.db import Error

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.logs import Log
from djqueue.core.messages import in_one_line
from djqueue.core.states import State
from djqueue.core.suggest import nearest
from djqueue.dashboard import audit
from djqueue.management.arguments import HelpFormatter
from djqueue.runtime.exits import MISUSED
from djqueue.storage.base import Storage

logger = Log("djqueue.audit")

PROGRESS_EVERY = 2_000
"""Milliseconds between two lines about progress."""

Options = Mapping[str, Any]
Run = Callable[[Options, "Output"], None]


class Subcommands(NamedTuple):
    """The place where subcommands are declared: the command, or a subcommand with subcommands of its own."""

    actions: Any
    """argparse's subparsers."""

    def add(self, name: str, run: Run, description: str) -> ArgumentParser:
        """Declare a subcommand, and return its parser, for its arguments.

        Args:
            run: Runs the subcommand.
            description: Help text; its first line appears in the list of subcommands.
        """
        parser = self._new_parser(name, description)
        parser.set_defaults(run=run)
        parser.add_argument("--json", action="store_true", help="Write one JSON document.")
        return parser

    def group(self, name: str, description: str) -> "Subcommands":
        """Declare a subcommand with subcommands of its own, such as `dead list`."""
        parser = self._new_parser(name, description)
        return Subcommands(parser.add_subparsers(dest=f"{name}_action", metavar="ACTION", required=True))

    def _new_parser(self, name: str, description: str) -> ArgumentParser:
        summary = description.strip().splitlines()[0].rstrip(".")
        parser: ArgumentParser = self.actions.add_parser(
            name,
            help=summary[0].lower() + summary[1:],
            description=description,
            formatter_class=HelpFormatter,
        )
        return parser


class Writable(Protocol):
    """A stream that is written to, such as Django's OutputWrapper."""

    def write(self, text: str, /) -> Any:
        """Write text."""

    def flush(self) -> None:
        """Flush what was written."""


class Output:
    """Writes the result of a subcommand: lines and tables for people, or one JSON document.

    Args:
        stdout: Where results go.
        stderr: Where progress and questions go.
        as_json: Only `document` writes; lines and tables are left out.
        stdin: Where answers come from.
    """

    def __init__(
        self, stdout: Writable, stderr: Writable, *, as_json: bool = False, stdin: TextIO | None = None
    ) -> None:
        self._stdout = stdout
        self._stderr = stderr
        self._stdin = stdin if stdin is not None else sys.stdin
        self.as_json = as_json

    def line(self, text: str = "") -> None:
        """Write a line for people."""
        if not self.as_json:
            self._stdout.write(f"{text}\n")

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Write aligned columns for people; numbers are right-aligned."""
        if self.as_json:
            return
        cells = [[shown(value) for value in row] for row in rows]
        is_number = [
            bool(cells) and all(cell[0].replace(",", "").isdigit() or cell == ("-",) for cell in column)
            for column in zip(*[[(value,) for value in row] for row in cells], strict=True)
        ] or [False] * len(headings)
        widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
        for row in [list(headings), *cells]:
            parts = [
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, is_number, strict=True)
            ]
            self._stdout.write("  ".join(parts).rstrip() + "\n")

    def document(self, value: Any) -> None:
        """Write the JSON document, if one was requested."""
        if self.as_json:
            self._stdout.write(json.dumps(value, default=plain, ensure_ascii=False, indent=2) + "\n")

    def progress(self, text: str) -> None:
        """Write a line about work in progress, where it does not mix with the result."""
        self._stderr.write(f"{text}\n")
        self._stderr.flush()

    def confirm(self, question: str, *, assume_yes: bool) -> None:
        """Ask a question on a terminal. Raises CommandError unless the answer is yes.

        Without a terminal, and without `assume_yes`, nothing is asked and the subcommand is refused.
        """
        if assume_yes:
            return
        if not self._stdin.isatty():
            raise CommandError(
                f"{question} This needs a confirmation, and the input is not a terminal: add --no-input "
                "to run it without a question.",
                returncode=MISUSED,
            )
        self._stderr.write(f"{question} [y/N] ")
        self._stderr.flush()
        if self._stdin.readline().strip().lower() not in ("y", "yes"):
            raise CommandError("Nothing was changed.")


def record_progress(output: Output, text: str) -> Callable[[int], None]:
    """Return a function that says every two seconds how many records were read or written."""
    last = SYSTEM_CLOCK.monotonic()

    def progress(number: int) -> None:
        nonlocal last
        if (tick := SYSTEM_CLOCK.monotonic()) - last >= PROGRESS_EVERY:
            last = tick
            output.progress(text.format(number))

    return progress


def shown(value: Any) -> str:
    """Return a value as people read it."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, State):
        return value.value
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    return str(value)


def plain(value: Any) -> Any:
    """Return a JSON value for one that JSON lacks."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def add_confirmation(parser: ArgumentParser, changes: str) -> None:
    """Add the options of a subcommand that changes or deletes many jobs."""
    parser.add_argument("--dry-run", action="store_true", help=f"Only count what would be {changes}.")
    add_no_input(parser)


def add_no_input(parser: ArgumentParser) -> None:
    """Add the option of a subcommand that asks for confirmation."""
    parser.add_argument(
        "--no-input", "--yes", action="store_true", dest="no_input", help="Do not ask for confirmation."
    )


def add_ids(parser: ArgumentParser) -> None:
    """Add the IDs of jobs, and the queue that has them."""
    parser.add_argument("ids", metavar="ID", nargs="+", help="IDs of jobs.")
    parser.add_argument(
        "--queue", metavar="NAME", help="Queue of the jobs (default: the one that has the IDs)."
    )


def used_queue(storage: Storage, name: str) -> str:
    """Return the name of a queue that has been used. Raises CommandError."""
    names = storage.queues.names()
    if name not in names:
        raise CommandError(f"no queue {name!r} has been used{nearest(name, names) or '.'}")
    return name


def located(storage: Storage, ids: Sequence[str], queue: str | None) -> dict[str, list[str]]:
    """Return the IDs by queue. Raises CommandError for an unknown job, or one that several queues have."""
    if queue is not None:
        states = storage.reads.states(queue, ids)
        missing = [job_id for job_id, state in zip(ids, states, strict=True) if state is None]
        if missing:
            raise CommandError(f"queue {queue!r} has no job {missing[0]!r}")
        return {queue: list(ids)}
    by_queue: dict[str, list[str]] = {}
    for job_id in ids:
        queues = [name for name, _ in storage.reads.find(job_id)]
        if not queues:
            raise CommandError(f"no queue has a job {job_id!r}; its record may have expired")
        if len(queues) > 1:
            raise CommandError(
                f"job {job_id!r} is in several queues ({', '.join(sorted(queues))}): name one with --queue"
            )
        by_queue.setdefault(queues[0], []).append(job_id)
    return by_queue


def note(action: str, *, queue: str = "", job_id: str = "", count: int = 0, **detail: Any) -> None:
    """Record an action of the operating system's user. See `djqueue.dashboard.audit.record`."""
    try:
        audit.record(
            user=f"{_login()} (command line)",
            action=action,
            queue=queue,
            job_id=job_id,
            count=count,
            detail=detail.pop("detail", {}) | detail,
        )
    except Error as error:
        # A project without database storage need not have the tables; the action itself has succeeded.
        logger.warning("The activity log could not be written: %s", in_one_line(error))


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown user"
