"""The command `manage.py djqueue`."""

from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import Error

from djqueue.client import get_storage
from djqueue.core.errors import ArgumentsError, DjqueueError, OptionError
from djqueue.management import unusable_database
from djqueue.management.subcommands import backup, deadletters, jobs, operations, queues, schedules, workers
from djqueue.management.subcommands.base import Output, Subcommands
from djqueue.runtime.console import to_share
from djqueue.runtime.exits import MISUSED
from djqueue.storage.base import Storage

HELP = "Manage the jobs, schedules and workers of this project."
MODULES = (queues, jobs, deadletters, schedules, workers, backup, operations)
"""Modules with subcommands, in the order of the help."""
TABLES_ONLY = frozenset({"cron", "schedules", "mark", "backup", "doctor", "upgrade"})
"""Subcommands that need no jobs of the storage, or check its kind themselves."""


class Command(BaseCommand):
    """Operates on the jobs, schedules and workers of a project."""

    help = HELP
    _called_from_command_line = False
    """Set by Django if the command is a process of its own, and not a call in Python."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the subcommands."""
        subcommands = Subcommands(parser.add_subparsers(dest="action", metavar="ACTION", required=True))
        for module in MODULES:
            module.add(subcommands)

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run the command.

        `doctor` reports what the system checks find instead of stopping at it, and `health` needs none:
        those of Django fail if a SQLite database cannot be opened.
        """
        if options.get("action") in ("doctor", "health"):
            options["skip_checks"] = True
        try:
            return super().execute(*args, **options)
        except Error as error:
            raise unusable_database(error) from error

    def handle(self, *args: Any, **options: Any) -> None:
        """Run one subcommand."""
        output = Output(self.stdout, self.stderr, as_json=options.get("json", False))
        try:
            if self._called_from_command_line and options["action"] not in TABLES_ONLY:
                check_shared(get_storage())
            options["run"](options, output)
        except (ArgumentsError, OptionError) as error:
            raise CommandError(str(error), returncode=MISUSED) from error
        except UnicodeEncodeError as error:
            # An argument of the command line that is not valid UTF-8 has lone surrogates.
            raise CommandError(f"an argument is not valid text: {error}", returncode=MISUSED) from error
        except (DjqueueError, ImproperlyConfigured) as error:
            raise CommandError(str(error)) from error


def check_shared(storage: Storage) -> None:
    """Raise CommandError if the jobs exist only in the process that runs them, which this one is not."""
    if storage.capabilities.in_process:
        raise CommandError(
            "the jobs exist only in the process that runs them, which this command is not: "
            f"{to_share(storage)}",
            returncode=MISUSED,
        )
