"""A Celery project. Only `CELERY_TEST_URL` says where its broker and its results are."""

import os
import time

from celery import Celery, Task

URL = os.environ.get("CELERY_TEST_URL", "djqueue://")
app = Celery("tests.contrib.celery.app", broker=URL, backend=os.environ.get("CELERY_TEST_RESULTS", URL))
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_send_task_events=False,
    broker_transport_options={"lease": float(os.environ.get("CELERY_TEST_LEASE", "30"))},
)


@app.task(name="add")
def add(x: int, y: int) -> int:
    return x + y


@app.task(name="total")
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(name="try_again", bind=True)
def try_again(self: Task) -> int:
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    return int(self.request.retries)


@app.task(name="describe", bind=True)
def describe(self: Task, *args: object, **kwargs: object) -> dict[str, object]:
    request = self.request
    return {
        "args": list(args),
        "kwargs": kwargs,
        "id": request.id,
        "timelimit": list(request.timelimit),
        "priority": request.delivery_info["priority"],
        "routing_key": request.delivery_info["routing_key"],
        "origin": request.origin,
        "header": request.get("tenant"),
    }


@app.task(name="hold", acks_late=True)
def hold(path: str) -> str:
    """Run until the file at `path` is removed."""
    with open(f"{path}.starts", "a") as starts:
        starts.write(f"{os.getpid()}\n")
    while os.path.exists(path):
        time.sleep(0.05)
    return "released"
