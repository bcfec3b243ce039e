"""The email digest of an airline: its claims and the amount owed."""

from datetime import date
from pathlib import Path

from django.core.mail.backends.filebased import EmailBackend

from demo_project.flights.digests import Line, Summary, compose, on_disk
from demo_project.flights.rules import Refusal


def summary(**changes: object) -> Summary:
    fields = {
        "code": "UA",
        "airline": "United Air Lines Inc.",
        "flights": 58_665,
        "assessed": 550,
        "extraordinary": 31,
        "total": 24_000_500,
        "refused": {Refusal.ARRIVAL_UNKNOWN: 9, Refusal.AIRCRAFT_UNKNOWN: 3},
        "largest": (
            Line(date=date(2013, 7, 22), flight="UA 15", route="EWR-HNL", delay=1272, total=229_200),
        ),
    }
    return Summary(**(fields | changes))


def test_subject_contains_the_airline_its_claims_and_the_amount() -> None:
    assert compose(summary()).subject == "United Air Lines Inc.: 562 claims of 2013, $24,000,500 owed"


def test_each_airline_has_one_address_and_one_message_id() -> None:
    mail = compose(summary())
    assert mail.to == ["claims@ua.example"]
    assert mail.extra_headers["Message-ID"] == "<digest-2013-ua@flights.example>"


def test_body_contains_the_counts_the_largest_claims_and_the_refusals() -> None:
    lines = [" ".join(line.split()) for line in compose(summary()).body.splitlines()]
    assert "Badly delayed 562" in lines
    assert "Assessed 550" in lines
    assert "of these, extraordinary weather 31" in lines
    assert "Not assessable 12" in lines
    assert "Owed to passengers $24,000,500" in lines
    assert "2013-07-22 UA 15 EWR-HNL 21 h 12 min $229,200" in lines
    assert "Arrival not on record 9" in lines
    assert "Aircraft not on record 3" in lines


def test_email_to_an_airline_without_claims_contains_only_the_counts() -> None:
    body = compose(summary(assessed=0, extraordinary=0, total=0, refused={}, largest=())).body
    assert "Badly delayed                                    0" in body
    assert "largest" not in body
    assert "Not assessable for want of data" not in body


def test_two_emails_in_one_file_are_read_separately(tmp_path: Path) -> None:
    mails = [compose(summary()), compose(summary(code="AA", airline="American Airlines Inc."))]
    EmailBackend(file_path=str(tmp_path)).send_messages(mails)
    assert len(list(tmp_path.iterdir())) == 1
    assert [mail["To"] for mail in on_disk(tmp_path)] == ["claims@ua.example", "claims@aa.example"]
