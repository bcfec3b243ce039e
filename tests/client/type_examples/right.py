"""Uses of the API that type checkers accept, with the types that they infer."""

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Unpack, assert_type

from django.tasks import TaskContext

from djqueue import Backoff, EnqueueResult, JobType, Limiter, Permissions, Queue, job
from djqueue.client import QueueKeywords
from djqueue.contrib.tasks import task

HOUR = timedelta(hours=1)
EMAILS = Queue("emails", max_attempts=5, backoff="linear", on_duplicate="replace")
RULE = {"kind": "exponential", "base": 5}


@job
def add(a: int, b: int = 1) -> str:
    return str(a + b)


@job(queue="sums", max_attempts=2, timeout=HOUR, executor="isolated", limits={"memory": "256 MiB"})
def double(a: int) -> float:
    return 2.0 * a


@job(backoff=lambda failures, error: 60 if isinstance(error, OSError) else 5, redact=lambda value, part: "…")
def fetch(url: str, wait: int = 1) -> dict[str, Any]:
    return {"url": url, "wait": wait}


@job(
    cron="0 3 * * *",
    timezone="Europe/Vienna",
    overlap="skip",
    blackouts=["sun"],
    backoff=Backoff(kind="fixed"),
)
def clean() -> None: ...


@job(batch={"size": 50, "wait": 0.5}, queue="emails")
def send_all(jobs: list[Any]) -> None: ...


@job
async def later(a: int) -> bytes:
    return bytes(a)


@job(permissions=Permissions(net=["example.org"]), allow_unenforced=["net"], retention=None)
async def afetch(url: str) -> str:
    return url


@job
def report(year: int) -> Generator[dict[str, int], None, str]:
    yield {"month": 1, "orders": year}
    return "twelve months"


@job(queue="reports")
def lines(path: str) -> Iterator[str]:
    yield path


@job
async def answer(question: str) -> AsyncIterator[str]:
    yield question


@task
def receipt(order: int) -> str:
    return str(order)


@task(queue_name="emails", max_attempts=5, timeout=30, cron=None)
async def remind(order: int) -> bool:
    return order > 0


@task(takes_context=True)
def attempt(context: TaskContext[Any, Any], order: int) -> int:
    return context.attempt + order


def enqueue(payload: object, **options: Unpack[QueueKeywords]) -> EnqueueResult:
    return EMAILS.enqueue(payload, **options)


def run(job_type: JobType[..., str]) -> str:
    return job_type.enqueue_and_wait(1) + job_type(1)


def use() -> None:
    assert_type(add(1, b=2), str)
    assert_type(add.enqueue(1, b=2), EnqueueResult[str])
    assert_type(add.enqueue(1).wait(), str)
    assert_type(add.enqueue(1).refresh().result, str | None)
    assert_type(add.enqueue_many([((1,), {}), ((2,), {"b": 3})]), list[EnqueueResult[str]])
    assert_type(add.enqueue_and_wait(1, b=2), str)
    assert_type(add.enqueue_and_wait(1, wait=HOUR), str)
    assert_type(add.using(priority=3)(1), str)
    assert_type(add.using(delay=HOUR, id="a", check_arguments=False).enqueue(1), EnqueueResult[str])
    assert_type(add.using(depends_on=[double.enqueue(1), ("sums", "a")], wait=5).enqueue_and_wait(1), str)
    assert_type(double.enqueue(1), EnqueueResult[float])
    assert_type(fetch.using(wait=10).enqueue_and_wait("example.org", wait=2), dict[str, Any])
    assert_type(run(add), str)
    add.using(backoff=RULE, tags=("a", "b"), headers={"tenant": 7}, run_at=datetime.now(UTC))
    send_all.enqueue("ann@example.com")
    clean.schedule("hourly", every=HOUR, jitter=5)


async def ause() -> None:
    assert_type(await later(1), bytes)
    assert_type(await asyncio.create_task(later(1)), bytes)
    assert_type(await later.aenqueue(1), EnqueueResult[bytes])
    assert_type(await (await later.aenqueue(1)).await_(), bytes)
    assert_type(await later.aenqueue_and_wait(1), bytes)
    assert_type(await add.aenqueue_and_wait(1, wait=2.5), str)
    assert_type(await afetch.using(queue="slow")("example.org"), str)
    assert_type(afetch.enqueue("example.org"), EnqueueResult[str])
    assert_type([word async for word in answer.aenqueue_and_stream("how?", wait=None)], list[str])


def stream() -> Generator[object, None, None]:
    assert_type([row["orders"] for row in report.enqueue_and_stream(2026, wait=30)], list[int])
    assert_type((yield from report.stream(report.enqueue(2026))), str)
    assert_type(report.enqueue_and_wait(2026), str)
    assert_type(next(lines.enqueue_and_stream("a.txt", on_restart="continue")), str)


async def control() -> None:
    assert_type(enqueue({"n": 1}, priority=3, tags=["a"]), EnqueueResult)
    assert_type(EMAILS.enqueue_many(range(3), delay=5), list[EnqueueResult])
    assert_type(await EMAILS.acounts(), dict[str, int])
    assert_type(await EMAILS.aclean(60, limit=5), int)
    EMAILS.set_limits(rate="100/s", concurrency=None)
    EMAILS.set_key_limit("customer:7", 2, rate=(10, HOUR))
    await Limiter("mail").aset(rate=None)


def tasks() -> None:
    assert_type(receipt.enqueue(42).return_value, str)
    assert_type(remind.using(priority=10, unique_key="order-42").enqueue(42).return_value, bool)
    assert_type(attempt.enqueue(order=42).return_value, int)
    assert_type(attempt.call(42), int)
