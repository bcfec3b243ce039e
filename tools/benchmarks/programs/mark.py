"""The mark that each handler leaves, and the payload of each job, for peers in Python."""

import atexit
import os
import sys
import time
from typing import Any

MARKS = os.open(os.environ["BENCH_MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
REDIS = os.environ.get("BENCH_REDIS", "")
POSTGRES = os.environ.get("BENCH_POSTGRES", "")
SLOTS = int(os.environ.get("BENCH_SLOTS", "10"))
"""How many jobs the worker runs at once, for peers that read this from their settings."""


def mark() -> None:
    os.write(MARKS, b"x")


def payloads() -> list[dict[str, Any]]:
    """Return as many payloads as the command line says; the time from now to the end is printed."""
    start = time.monotonic()
    atexit.register(lambda: print(f"filled in {time.monotonic() - start} seconds", flush=True))
    return [{"n": n, "user": f"user-{n}", "text": "x" * 100} for n in range(int(sys.argv[1]))]
