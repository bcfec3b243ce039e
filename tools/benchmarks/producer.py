"""Another process that enqueues a job for each line that it is sent."""

import os
import sys
import time

from tools.benchmarks.measures import QUEUE, configure


def main() -> None:
    """Until standard input ends."""
    configure(os.environ["DJQUEUE_BENCH_DIR"])
    from djqueue import Queue

    queue = Queue(QUEUE)
    for _ in sys.stdin:
        queue.enqueue({"at": time.monotonic()})


if __name__ == "__main__":
    main()
