"""Write the mail that tells an airline what it owes."""

import email
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from email.message import Message
from pathlib import Path

from django.core.mail import EmailMessage

from .rules import Refusal

SENDER = "claims@flights.example"
SEPARATOR = b"-" * 79


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One of an airline's largest claims."""

    date: date
    flight: str
    route: str
    delay: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """An airline's claims of the year."""

    code: str
    airline: str
    flights: int
    assessed: int
    extraordinary: int
    total: int
    refused: Mapping[Refusal, int]
    largest: tuple[Line, ...]

    @property
    def claims(self) -> int:
        return self.assessed + self.refusals

    @property
    def refusals(self) -> int:
        return sum(self.refused.values())


def compose(summary: Summary) -> EmailMessage:
    return EmailMessage(
        subject=f"{summary.airline}: {summary.claims:,} claims of 2013, ${summary.total:,} owed",
        body=body_of(summary),
        from_email=f"Flight claims <{SENDER}>",
        to=[f"claims@{summary.code.lower()}.example"],
        # The same digest always has the same identity: a mailbox can tell a mail delivered twice.
        headers={"Message-ID": f"<digest-2013-{summary.code.lower()}@flights.example>"},
    )


def body_of(summary: Summary) -> str:
    return "\n\n".join(filter(None, (counts_of(summary), largest_of(summary), refusals_of(summary)))) + "\n"


def counts_of(summary: Summary) -> str:
    rows = (
        ("Flights from New York", f"{summary.flights:,}"),
        ("Badly delayed", f"{summary.claims:,}"),
        ("Assessed", f"{summary.assessed:,}"),
        ("  of these, extraordinary weather", f"{summary.extraordinary:,}"),
        ("Not assessable", f"{summary.refusals:,}"),
        ("Owed to passengers", f"${summary.total:,}"),
    )
    return "\n".join(f"{label:<36}{value:>14}" for label, value in rows)


def largest_of(summary: Summary) -> str:
    if not summary.largest:
        return ""
    heading = f"{'Date':<12}{'Flight':<10}{'Route':<10}{'Delay':>10}{'Owed':>14}"
    return "\n".join(["The largest claims", "", heading, *map(row_of, summary.largest)])


def row_of(line: Line) -> str:
    delay = f"{line.delay // 60} h {line.delay % 60:02} min"
    return f"{line.date!s:<12}{line.flight:<10}{line.route:<10}{delay:>10}{f'${line.total:,}':>14}"


def refusals_of(summary: Summary) -> str:
    if not summary.refusals:
        return ""
    return "\n".join(
        ["Not assessable for want of data", ""]
        + [f"{refusal.capitalize():<36}{count:>14,}" for refusal, count in summary.refused.items() if count]
    )


def on_disk(directory: Path) -> Iterator[Message]:
    """The mails that Django's file backend wrote, of which one file can hold several."""
    for path in sorted(directory.glob("*.log")):
        for part in path.read_bytes().split(SEPARATOR):
            if part.strip():
                yield email.message_from_bytes(part.lstrip())
