"""The demo's handlers, called directly: they write their results once, even when run twice."""

from .project import DemoProject

SETUP = """
from djqueue import UnrecoverableError
from demo_project.flights.jobs import assess_claim, send_digest
from demo_project.flights.models import Airline, Compensation, Digest, Flight
"""


def test_claim_assessed_twice_creates_one_compensation(project: DemoProject) -> None:
    answer = project.evaluate(
        f"""{SETUP}
Flight.objects.filter(pk=1).update(arrival_delay=200)
totals = [assess_claim(1), assess_claim(1)]
answer = [totals, list(Compensation.objects.values("flight_id", "band", "seats", "total"))]
"""
    )
    assert answer == [
        [149 * 400] * 2,
        [{"flight_id": 1, "band": "medium", "seats": 149, "total": 149 * 400}],
    ]


def test_claim_with_missing_data_fails_without_retries(project: DemoProject) -> None:
    reasons = project.evaluate(
        f"""{SETUP}
def refusal(**changes):
    Flight.objects.filter(pk=1).update(**changes)
    try:
        return assess_claim(1)
    except UnrecoverableError as error:
        return str(error)
answer = [refusal(departure_delay=200, arrival_delay=None), refusal(arrival_delay=200, plane=None)]
"""
    )
    assert reasons == [
        "arrival not on record: it left three hours late or more",
        "aircraft not on record: N14228",
    ]


def test_digest_sent_twice_is_one_email(project: DemoProject) -> None:
    answer = project.evaluate(
        f"""{SETUP}
from pathlib import Path
from django.conf import settings
from demo_project.flights.digests import on_disk
sent = [send_digest("UA"), send_digest("UA")]
answer = [sent, Digest.objects.count(), sum(1 for _ in on_disk(Path(settings.EMAIL_FILE_PATH)))]
"""
    )
    assert answer == [[True, False], 1, 1]


def test_digest_is_not_recorded_when_its_email_cannot_be_sent(
    project: DemoProject,
) -> None:
    (project.var / "mail").write_text("a file where the directory should be")
    answer = project.evaluate(
        f"""{SETUP}
from django.core.exceptions import ImproperlyConfigured
try:
    send_digest("UA")
except ImproperlyConfigured as error:
    answer = [Digest.objects.count(), type(error).__name__]
"""
    )
    assert answer == [0, "ImproperlyConfigured"]
