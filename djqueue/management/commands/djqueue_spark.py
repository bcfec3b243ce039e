"""The command `manage.py djqueue_spark`."""

from argparse import ArgumentParser, Namespace
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import Error, router

from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.contrib.spark.pipeline.commands import PipelineContext, run
from djqueue.contrib.spark.pipeline.main import FAILED, WRONG
from djqueue.contrib.spark.pipeline.parser import HELP, add_commands
from djqueue.contrib.spark.project import place_of
from djqueue.core.errors import ConfigurationError, DjqueueError, OptionError
from djqueue.core.shown import in_one_line
from djqueue.management.commands.runworkers import RunworkersHelpFormatter
from djqueue.models import Rollup
from djqueue.storage.database import DatabaseStorage


class Command(BaseCommand):
    """Runs Spark pipelines on the queues of this project."""

    help = HELP

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        """Create a parser that keeps the paragraphs of descriptions."""
        kwargs.setdefault("formatter_class", RunworkersHelpFormatter)
        return super().create_parser(prog_name, subcommand, **kwargs)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add a subcommand for each pipeline operation."""
        add_commands(parser, is_project=True)

    def handle(self, *args: Any, **options: Any) -> None:
        """Run one pipeline operation."""
        try:
            run(Namespace(**options), _context(options), self._write)
        except OptionError as error:
            raise CommandError(str(error), returncode=WRONG) from error
        except (DjqueueError, ImproperlyConfigured) as error:
            raise CommandError(str(error), returncode=FAILED) from error
        except Error as error:
            raise CommandError(f"the database cannot be used: {in_one_line(error)}") from error

    def _write(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()


def _context(options: dict[str, Any]) -> PipelineContext:
    """Return the storage and database to use: from the command line, otherwise from the settings."""
    storage = get_storage()
    where = {"url": options["url"]} if options["url"] else place_of(get_settings())
    if options["key_prefix"]:
        where["keyPrefix"] = options["key_prefix"]
    if "url" not in where:
        raise ConfigurationError(
            f"Spark needs a URL, and the settings have none for {storage.describe()}; pass it as --url"
        )
    alias = storage.alias if isinstance(storage, DatabaseStorage) else router.db_for_write(Rollup)
    return PipelineContext(where, alias)
