"""Celery on Redis, without a result backend, as it is by default."""

from celery import Celery
from mark import REDIS, mark, payloads

app = Celery("celery_app", broker=REDIS)


@app.task
def touch(n, user, text):
    mark()
    return {"ok": True}


if __name__ == "__main__":
    for payload in payloads():
        touch.delay(**payload)
