"""`python -m tools.benchmarks.script_costs`: what scripts cost the Redis server.

Each row is one call: k finished jobs and k claims, or an enqueue. Microseconds of processor time come from
the server's own statistics and vary with the machine; `--instructions` counts instructions with callgrind,
which vary by a fifth at most, since Redis resizes its tables now and then.
"""

import argparse
import re
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from djqueue.core.job import Batch, Claimed, ClaimRequest, Outcome
from djqueue.core.options import JobOptions
from djqueue.storage.redis import RedisStorage
from tests.servers import RedisServer

QUEUE = "bench"
SIZES = (1, 10, 50, 100)
BULK = 1_000
PAYLOAD = b"x" * 100
NAMES = frozenset({"send_email", "resize_image"})


class TracedRedis(RedisServer):
    """A Redis under callgrind, which is about fifty times slower."""

    def command(self) -> list[str]:
        return [
            "valgrind",
            "--tool=callgrind",
            f"--callgrind-out-file={self.folder}/calls",
            *super().command(),
        ]


def main() -> int:
    """Measure each size and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instructions", action="store_true", help="count instructions instead of time")
    parser.add_argument(
        "--calls", type=int, default=0, help="calls of each size (default: 2000; 100 counted)"
    )
    parser.add_argument("--profile", type=Path, help="--instructions: write callgrind's profile here")
    parser.add_argument(
        "--size", type=int, default=1, help="--profile: finishes and claims of the profiled call"
    )
    options = parser.parse_args()
    calls = options.calls or (100 if options.instructions else 2_000)
    with TracedRedis() if options.instructions else RedisServer() as server:
        cost = _instructions(server) if options.instructions else _microseconds(server)
        with closing(RedisStorage(TIMEOUT=60, **server.options)) as storage:
            _exchanges(storage, _uncounted, BULK, 15)  # small hashes are stored otherwise
            found = {f"{size}+{size}": _exchanges(storage, cost, size, calls) for size in SIZES}
            found[f"enqueue {BULK}"] = _enqueues(storage, cost, 1_000, max(10, calls // 100))
            found["enqueue 1"] = _enqueues(storage, cost, 1, calls)
            if options.profile:
                _exchanges(storage, lambda run: cost(run, options.profile), options.size, calls)
    unit = "instructions" if options.instructions else "µs"
    print(f"{'call':>12} {unit:>14}")
    for name, value in found.items():
        print(f"{name:>12} {value:>14,.0f}" if options.instructions else f"{name:>12} {value:>14,.1f}")
    slope = (found["50+50"] - found["1+1"]) / 49
    print(f"fixed {found['1+1'] - slope:,.1f}, per job {slope:,.1f}")
    return 0


Cost = Callable[[Callable[[], None]], float]


def _exchanges(storage: RedisStorage, cost: Cost, size: int, calls: int) -> float:
    """Return the cost of a call that finishes and claims `size` jobs."""
    _enqueue(storage, size * (calls + 2))
    request = ClaimRequest("worker-1", size, NAMES, (QUEUE,))
    jobs = storage.claim(request).jobs

    def exchange() -> None:
        nonlocal jobs
        jobs = storage.finish(_outcomes(jobs), request).claims.jobs
        assert len(jobs) == size

    exchange()
    found = cost(lambda: _repeat(exchange, calls))
    storage.finish(_outcomes(jobs), None)
    return found / calls


def _enqueues(storage: RedisStorage, cost: Cost, size: int, calls: int) -> float:
    """Return the cost of a call that enqueues `size` jobs."""
    _enqueue(storage, size)
    return cost(lambda: _repeat(lambda: _enqueue(storage, size), calls)) / calls


def _repeat(action: Callable[[], None], times: int) -> None:
    for _ in range(times):
        action()


def _enqueue(storage: RedisStorage, count: int) -> None:
    for first in range(0, count, BULK):
        payloads = [PAYLOAD] * min(BULK, count - first)
        storage.enqueue([Batch(QUEUE, "send_email", JobOptions(), payloads)])


def _outcomes(jobs: list[Claimed]) -> list[Outcome]:
    return [Outcome(QUEUE, job.id, job.token, "complete", b"\x02") for job in jobs]


def _uncounted(run: Callable[[], None]) -> float:
    run()
    return 0.0


def _microseconds(server: RedisServer) -> Cost:
    """Measure the server's processor time."""

    def used() -> float:
        with server.client() as client:
            found = client.info("cpu")
        return float(found["used_cpu_user"] + found["used_cpu_sys"]) * 1e6

    def cost(run: Callable[[], None]) -> float:
        before = used()
        run()
        return used() - before

    return cost


def _instructions(server: TracedRedis) -> Callable[..., float]:
    """Count the server's instructions outside the kernel."""
    with server.client() as client:
        process = str(client.info("server")["process_id"])
    dumps = 0

    def dump() -> Path:
        nonlocal dumps
        dumps += 1
        subprocess.run(["callgrind_control", "--dump", process], check=True, capture_output=True)
        return server.folder / f"calls.{dumps}"

    def cost(run: Callable[[], None], profile: Path | None = None) -> float:
        dump()  # counts begin again at zero
        run()
        found = dump()
        if profile is not None:
            profile.write_bytes(found.read_bytes())
        [total] = re.findall(r"^(?:summary|totals): (\d+)", found.read_text(), re.MULTILINE)[:1]
        return float(total)

    return cost


if __name__ == "__main__":
    raise SystemExit(main())
