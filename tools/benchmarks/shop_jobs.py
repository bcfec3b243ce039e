"""The jobs of the measured project, copied into it: several names and queues, whose handlers leave marks."""

import os
import struct
import time
from typing import Any

from djqueue import job

MARKS = os.open(os.environ["BENCH_MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
"""A file that the measuring process watches: each job appends a byte, which costs about a microsecond."""


def mark() -> dict[str, bool]:
    os.write(MARKS, b"x")
    return {"ok": True}


@job
async def touch(n: int, user: str, text: str) -> Any:
    return mark()


@job(queue="emails")
async def welcome(n: int, user: str, text: str) -> Any:
    return mark()


@job(queue="emails")
async def receipt(n: int, user: str, text: str) -> Any:
    return mark()


@job(queue="search")
async def index(n: int, user: str, text: str) -> Any:
    return mark()


@job(queue="search")
async def unindex(n: int, user: str, text: str) -> Any:
    return mark()


@job(queue="images")
def resize(n: int, user: str, text: str) -> Any:
    """Run on a thread, as every sync handler."""
    return mark()


@job
async def timed(at: float) -> None:
    """Leave the seconds since the enqueue as a mark of eight bytes."""
    os.write(MARKS, struct.pack("d", time.monotonic() - at))


@job
async def answer() -> Any:
    return {"ok": True}


@job
def compute(n: int, user: str, text: str) -> Any:
    """Keep a processor busy for about a millisecond."""
    sum(number * number for number in range(20_000))
    return mark()
