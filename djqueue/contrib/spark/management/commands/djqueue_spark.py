"""Run the Spark pipeline commands with the settings of a project."""

from argparse import ArgumentParser, Namespace
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, DjangoHelpFormatter
from django.db import Error, router

from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.contrib.spark.models import Rollup
from djqueue.contrib.spark.pipeline.commands import (
    FAILED,
    HELP,
    WRONG,
    PipelineContext,
    PipelineHelpFormatter,
    add_commands,
    run,
)
from djqueue.contrib.spark.project import storage_options
from djqueue.core.errors import ConfigurationError, DjqueueError, OptionError
from djqueue.core.messages import in_one_line


class SparkCommandHelpFormatter(PipelineHelpFormatter, DjangoHelpFormatter):
    """Django's help formatter, but with the paragraphs of the description."""


class Command(BaseCommand):
    """Archive ended jobs, and compute hourly metrics, on Spark."""

    help = HELP

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        """Create a parser that keeps the paragraphs of descriptions."""
        kwargs.setdefault("formatter_class", SparkCommandHelpFormatter)
        return super().create_parser(prog_name, subcommand, **kwargs)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the pipeline commands."""
        add_commands(parser, is_project=True)

    def handle(self, *args: Any, **options: Any) -> None:
        """Run a pipeline command."""
        try:
            run(Namespace(**options), _context(options), self._print_line)
        except OptionError as error:
            raise CommandError(str(error), returncode=WRONG) from error
        except (DjqueueError, ImproperlyConfigured) as error:
            raise CommandError(str(error), returncode=FAILED) from error
        except Error as error:
            raise CommandError(f"the database is not available: {in_one_line(error)}") from error

    def _print_line(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()


def _context(options: dict[str, Any]) -> PipelineContext:
    """Return the locations given on the command line, or else in the settings."""
    storage = get_storage()
    where = {"url": options["url"]} if options["url"] else storage_options(get_settings())
    if options["key_prefix"]:
        where["keyPrefix"] = options["key_prefix"]
    if "url" not in where:
        raise ConfigurationError(
            f"the settings define no URL for {storage.describe()}, which Spark requires; pass it with --url"
        )
    alias = storage.capabilities.database or router.db_for_write(Rollup)
    return PipelineContext(where, alias)
