"""The command `manage.py djqueue`."""

from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import Error

from djqueue.core.errors import ArgumentsError, DjqueueError, OptionError
from djqueue.core.shown import in_one_line
from djqueue.management.verbs import (
    annotations,
    backup,
    changes,
    controls,
    cron,
    dead,
    health,
    jobs,
    mirrored,
    stats,
    workers,
)
from djqueue.management.verbs.base import Output, Verbs
from djqueue.runtime.exits import MISUSED

HELP = "Manage the jobs, schedules and workers of this project."
GROUPS = (stats, jobs, changes, controls, dead, cron, workers, annotations, backup, mirrored, health)
"""Modules with verbs, in the order of the help."""


class Command(BaseCommand):
    """Operates on the jobs, schedules and workers of a project."""

    help = HELP

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add a subcommand for each verb."""
        verbs = Verbs(parser.add_subparsers(dest="action", metavar="ACTION", required=True))
        for group in GROUPS:
            group.add(verbs)

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run the command; `doctor` reports what the system checks find instead of stopping at it."""
        if options.get("action") == "doctor":
            options["skip_checks"] = True
        return super().execute(*args, **options)

    def handle(self, *args: Any, **options: Any) -> None:
        """Run one verb."""
        output = Output(self.stdout, self.stderr, as_json=options.get("json", False))
        try:
            options["run"](options, output)
        except (ArgumentsError, OptionError) as error:
            raise CommandError(str(error), returncode=MISUSED) from error
        except (DjqueueError, ImproperlyConfigured) as error:
            raise CommandError(str(error)) from error
        except Error as error:
            raise CommandError(f"the database cannot be used: {in_one_line(error)}") from error
