"""SAQ on Redis."""

import asyncio

from mark import REDIS, SLOTS, mark, payloads
from saq import Queue

queue = Queue.from_url(REDIS)


async def touch(ctx, *, n, user, text):
    mark()
    return {"ok": True}


settings = {"queue": queue, "functions": [touch], "concurrency": SLOTS}


async def fill():
    entries = payloads()
    for start in range(0, len(entries), 100):
        await asyncio.gather(*(queue.enqueue("touch", **entry) for entry in entries[start : start + 100]))
    await queue.disconnect()


if __name__ == "__main__":
    asyncio.run(fill())
