"""Hold what the jobs left behind against what the data say they should have."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from django.conf import settings
from django.db.models import Sum
from PIL import Image

from demo_project.flights import season
from demo_project.flights.charts import SIZE
from demo_project.flights.dataset import TOTAL_FLIGHTS
from demo_project.flights.digests import on_disk
from demo_project.flights.models import Airline, Compensation, DelayChart, Digest, Flight
from demo_project.flights.rules import Refusal
from djqueue.models import DeadLetter

OTHER = "any other reason"


class Count(NamedTuple):
    """A number that the data call for, and the number found."""

    what: str
    expected: int
    found: int

    @property
    def adds_up(self) -> bool:
        return self.expected == self.found


def tally(limit: int | None) -> list[Count]:
    """All the counts of a finished season of the first `limit` flights, or of all."""
    return [
        Count("flights loaded", min(limit or TOTAL_FLIGHTS, TOTAL_FLIGHTS), Flight.objects.count()),
        *claims(),
        *charts(),
        *digests(),
        Count("jobs still open", 0, season.open_jobs()),
    ]


def claims() -> Iterator[Count]:
    flights = Flight.objects.badly_delayed()
    arrival_unknown, aircraft_unknown = (
        flights.arrival_unknown().count(),
        flights.aircraft_unknown().count(),
    )
    assessed, dead = Compensation.objects.count(), dead_letters_by_reason()
    yield Count("badly delayed flights", flights.count(), assessed + dead.total())
    yield Count("  assessed", flights.count() - arrival_unknown - aircraft_unknown, assessed)
    yield Count(f"  dead letter: {Refusal.ARRIVAL_UNKNOWN}", arrival_unknown, dead[Refusal.ARRIVAL_UNKNOWN])
    yield Count(
        f"  dead letter: {Refusal.AIRCRAFT_UNKNOWN}",
        aircraft_unknown,
        dead[Refusal.AIRCRAFT_UNKNOWN],
    )
    yield Count(f"  dead letter: {OTHER}", 0, dead[OTHER])


def dead_letters_by_reason() -> Counter[str]:
    messages = DeadLetter.objects.filter(queue="claims").values_list("error_message", flat=True)
    return Counter(
        next((refusal for refusal in Refusal if refusal in message), OTHER) for message in messages
    )


def charts() -> Iterator[Count]:
    airports = len(season.served_airports())
    yield Count("airports with a delay chart", airports, DelayChart.objects.count())
    yield Count(
        "  charts on disk",
        airports,
        sum(map(is_chart, Path(settings.MEDIA_ROOT).glob("charts/*.png"))),
    )


def is_chart(path: Path) -> bool:
    with Image.open(path) as image:
        image.load()
        return image.format == "PNG" and image.size == SIZE


def digests() -> Iterator[Count]:
    airlines = Airline.objects.count()
    yield Count("airlines with a digest", airlines, Digest.objects.count())
    yield Count("  mails on disk", airlines, sum(1 for _ in on_disk(Path(settings.EMAIL_FILE_PATH))))
    owed = Compensation.objects.aggregate(total=Sum("total", default=0))["total"]
    yield Count("  dollars owed", owed, Digest.objects.aggregate(total=Sum("total", default=0))["total"])


def table(counts: Iterable[Count]) -> str:
    rows = [f"{'':<42}{'expected':>16}{'found':>16}"]
    for count in counts:
        remark = "" if count.adds_up else "   differs"
        rows.append(f"{count.what:<42}{count.expected:>16,}{count.found:>16,}{remark}")
    return "\n".join(rows)


def differences(counts: Iterable[Count]) -> list[str]:
    return [
        f"{count.what.strip()}: expected {count.expected:,}, found {count.found:,}"
        for count in counts
        if not count.adds_up
    ]
