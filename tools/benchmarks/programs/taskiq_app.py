"""taskiq on a stream of Redis, which its documentation recommends."""

import asyncio

from mark import REDIS, mark, payloads
from taskiq_redis import RedisStreamBroker

broker = RedisStreamBroker(url=REDIS)


@broker.task(task_name="touch")
async def touch(n: int, user: str, text: str) -> dict:
    mark()
    return {"ok": True}


async def fill():
    await broker.startup()
    entries = payloads()
    for start in range(0, len(entries), 100):
        await asyncio.gather(*(touch.kiq(**entry) for entry in entries[start : start + 100]))
    await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(fill())
