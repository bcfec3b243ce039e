"""RQ, with its default worker, which forks for each job."""

from mark import REDIS, mark, payloads
from redis import Redis
from rq import Queue


def touch(n, user, text):
    mark()
    return {"ok": True}


if __name__ == "__main__":
    queue = Queue(connection=Redis.from_url(REDIS))
    entries = [Queue.prepare_data("rq_app.touch", kwargs=payload) for payload in payloads()]
    queue.enqueue_many(entries)
