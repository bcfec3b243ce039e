"""Mistakes that type checkers report, each with the codes of mypy and pyright at the end of its line."""

from typing import Any

from djqueue import Limiter, Queue, job
from djqueue.contrib.tasks import task

EMAILS = Queue("emails")


@job
def add(a: int, b: int = 1) -> str:
    return str(a + b)


@job(queue="sums", max_attempts=2)
def double(a: int) -> float:
    return 2.0 * a


@job
async def later(a: int) -> bytes:
    return bytes(a)


@task(queue_name="emails", max_attempts=5)
def receipt(order: int) -> str:
    return str(order)


# Options of jobs.
job(retries=3)  # mypy: call-overload; pyright: reportCallIssue
job(priority="high")  # mypy: call-overload; pyright: reportArgumentType
job(batch=10, retries=3)  # mypy: call-overload; pyright: reportCallIssue
job(executor="thread")  # mypy: call-overload; pyright: reportArgumentType
job(backoff="often")  # mypy: call-overload; pyright: reportArgumentType
job(overlap="never", every=5)  # mypy: call-overload; pyright: reportArgumentType
add.using(retries=3)  # mypy: call-arg; pyright: reportCallIssue
add.using(priority="high")  # mypy: arg-type; pyright: reportArgumentType
add.using(countdown=60)  # mypy: call-arg; pyright: reportCallIssue
add.using(backoff=lambda failures, error: 5)  # mypy: arg-type; pyright: reportArgumentType
add.using(executor="isolated")  # mypy: call-arg; pyright: reportCallIssue
add.using(tags="urgent")  # mypy: arg-type; pyright: reportArgumentType
add.using(depends_on="a")  # mypy: arg-type; pyright: reportArgumentType
add.schedule("hourly", cron=5)  # mypy: arg-type; pyright: reportArgumentType

# Options of queues.
Queue("emails", retries=3)  # mypy: call-arg; pyright: reportCallIssue
EMAILS.enqueue({}, priority="high")  # mypy: arg-type; pyright: reportArgumentType
EMAILS.enqueue({}, queue="sums")  # mypy: call-arg; pyright: reportCallIssue
EMAILS.enqueue_many([], on_duplicate="ignore")  # mypy: arg-type; pyright: reportArgumentType
EMAILS.enqueue_and_wait({}, wait="30")  # mypy: arg-type; pyright: reportArgumentType
EMAILS.set_limits(rate=100)  # mypy: arg-type; pyright: reportArgumentType
Limiter("mail").set(concurrency="5")  # mypy: arg-type; pyright: reportArgumentType

# Arguments of functions.
add.enqueue("no number")  # mypy: arg-type; pyright: reportArgumentType
add.enqueue(1, c=2)  # mypy: call-arg; pyright: reportCallIssue
double.enqueue()  # mypy: call-arg; pyright: reportCallIssue
add(1, 2, 3)  # mypy: call-arg; pyright: reportCallIssue
add.using(priority=1).enqueue(b=2)  # mypy: call-arg; pyright: reportCallIssue
add.enqueue_and_wait("no number")  # mypy: call-overload; pyright: reportArgumentType
double.enqueue_and_stream(1)  # mypy: misc; pyright: reportAttributeAccessIssue
wrong_id = EMAILS.acancel(1)  # mypy: arg-type; pyright: reportArgumentType

# Results.
number: int = add.enqueue_and_wait(1)  # mypy: assignment; pyright: reportAssignmentType
text: str = later(1)  # mypy: assignment; pyright: reportAssignmentType
total: int = later.enqueue(1).wait()  # mypy: assignment; pyright: reportAssignmentType

# Tasks.
task(retries=3)  # mypy: call-overload; pyright: reportCallIssue
task(priority="high")  # mypy: call-overload; pyright: reportArgumentType
receipt.using(queue="sums")  # mypy: call-arg; pyright: reportCallIssue
receipt.using(max_attempts="5")  # mypy: arg-type; pyright: reportArgumentType
receipt.enqueue("no number")  # mypy: arg-type; pyright: reportArgumentType
order: int = receipt.enqueue(1).return_value  # mypy: assignment; pyright: reportAssignmentType


@task(takes_context=True)  # mypy: arg-type; pyright: reportArgumentType reportCallIssue
def attempt(order: int, context: Any) -> int:
    return order
