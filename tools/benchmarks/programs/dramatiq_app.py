"""Dramatiq on Redis."""

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from mark import REDIS, mark, payloads

dramatiq.set_broker(RedisBroker(url=REDIS))


@dramatiq.actor
def touch(n, user, text):
    mark()


if __name__ == "__main__":
    for payload in payloads():
        touch.send(**payload)
