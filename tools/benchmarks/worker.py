"""A worker process for the benchmarks: runs a queue until it is empty, once it is told to begin."""

import asyncio
import os
import sys

from tools.benchmarks.measures import QUEUE, configure, no_op


def main() -> None:
    """Get ready, say so, wait for the end of standard input, and work."""
    configure("/nowhere")
    from djqueue import Worker
    from djqueue.storage.redis import RedisStorage

    storage = RedisStorage(url=os.environ["DJQUEUE_BENCH_REDIS"])
    storage.connect()
    worker = Worker(storage, [QUEUE], {QUEUE: no_op}, concurrency=100, until_empty=True, maintain=False)
    print("ready", flush=True)
    sys.stdin.read()
    asyncio.run(worker.run())
    storage.close()


if __name__ == "__main__":
    main()
