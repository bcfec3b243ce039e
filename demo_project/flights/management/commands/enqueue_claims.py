"""Enqueue the season's claims, charts and digests."""

from typing import Any

from django.core.management.base import BaseCommand

from demo_project.flights import season


class Command(BaseCommand):
    help = "Enqueue a claim for each badly delayed flight, a chart an airport, a digest an airline."

    def handle(self, *_args: Any, **_options: Any) -> None:
        if season.enqueued_before():
            self.stdout.write("The season's work is enqueued already.")
            return
        work = season.enqueue()
        self.stdout.write(f"{work.claims:>9,} claims to assess")
        self.stdout.write(f"{work.charts:>9,} charts to draw")
