"""`manage.py djqueue_spark`."""

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


class Command(BaseCommand):
    """What goes on around the queue of this project, in Spark."""

    help = HELP

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        """See `BaseCommand.create_parser`."""
        kwargs.setdefault("formatter_class", RunworkersHelpFormatter)
        return super().create_parser(prog_name, subcommand, **kwargs)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """See `BaseCommand.add_arguments`."""
        add_commands(parser, is_project=True)

    def handle(self, *args: Any, **options: Any) -> None:
        """See `BaseCommand.handle`."""
        try:
            run(Namespace(**options), _place(options), self._tell)
        except OptionError as error:
            raise CommandError(str(error), returncode=WRONG) from error
        except (DjqueueError, ImproperlyConfigured) as error:
            raise CommandError(str(error), returncode=FAILED) from error
        except Error as error:
            raise CommandError(f"the database cannot be used: {in_one_line(error)}") from error

    def _tell(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()


def _place(options: dict[str, Any]) -> PipelineContext:
    """Where the command line says, else where the settings say."""
    storage = get_storage()
    where = {"url": options["url"]} if options["url"] else place_of(get_settings())
    if options["key_prefix"]:
        where["keyPrefix"] = options["key_prefix"]
    if "url" not in where:
        raise ConfigurationError(
            f"the settings have no URL of {storage.describe()}, which Spark needs: say it by --url"
        )
    alias = storage.capabilities.database or router.db_for_write(Rollup)
    return PipelineContext(where, alias)
