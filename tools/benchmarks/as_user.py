"""`python -m tools.benchmarks --as-user`: what a user gets from `manage.py runworkers` with default settings.

Each measurement has a new project, a new storage and real processes. The handlers of several job names, in
several queues, leave marks in a file, which this process watches. The measurements take turns within each
run, so that all of them see the same machine.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from tools.benchmarks.bare import RecordingProxy, bare_drain, percentile, replay
from tools.benchmarks.client import ASYNC_NAMES
from tools.benchmarks.marks import Drain
from tools.benchmarks.projects import STORAGES, Client, Site
from tools.benchmarks.reporting import Ratio, Value, Values, rows, shown, write_docs
from tools.benchmarks.usage import redis_usage, session_memory


@dataclass(frozen=True)
class Measure:
    """A measurement, where it makes sense, and those whose values its ratios need."""

    function: Callable[[str, float], Values]
    storages: tuple[str, ...] = STORAGES
    needs: tuple[str, ...] = ()


def rate(drained: Drain) -> Value:
    return Value(drained.rate, "jobs/s", drained.cpu, drained.cores)


ON_REDIS, DATABASES = ("redis",), ("sqlite", "postgresql")
JOBS = {
    "redis": {1: 5_000, 10: 20_000, 100: 50_000},
    "sqlite": {1: 20_000, 10: 50_000, 100: 60_000},
    "postgresql": {1: 6_000, 10: 25_000, 100: 40_000},
    "scheduler": {1: 20_000, 10: 50_000, 100: 60_000},
    "memory": {1: 20_000, 10: 40_000, 100: 60_000},
}
"""The size of the backlog, by storage and concurrency."""
COMPUTING = 6_000
"""Jobs that compute for about a millisecond each."""
REQUESTS = 600
"""Single enqueues, in turns with the calls that they are compared with."""
MANY = 1_000_000
"""The size of a backlog that is not to be felt."""


LIMIT = 2.0
"""Seconds to which the measurement of a backlog is limited, after its warm-up."""


def concurrency(slots: int) -> list[str]:
    """Return the flag of `runworkers`; 10 is the default, which needs none."""
    return [] if slots == 10 else ["--concurrency", str(slots)]


def drain(
    storage: str,
    slots: int,
    scale: float,
    *,
    names: tuple[str, ...] = ASYNC_NAMES,
    flags: tuple[str, ...] = (),
    workers: int = 1,
    mirror: bool = True,
    prepare: tuple[str, ...] = (),
    fill: str = "fill",
) -> Value:
    """Drain a backlog of several names in several queues.

    prepare: What the producer does before, by the names of its functions.
    fill: The name of the function that enqueues the jobs.
    """
    count = int(JOBS[storage][slots] * scale)
    with Site(storage, mirror=mirror) as site:
        more = sum(site.client.call(name) or 0 for name in prepare)
        site.client.call(fill, count, names)
        if more:  # jobs that wait until the end are not counted
            count += more
        return rate(site.drain(count, *concurrency(slots), *flags, workers=workers, limit=LIMIT))


def drain_at(slots: int) -> Callable[[str, float], Values]:
    def measure(storage: str, scale: float) -> Values:
        return {f"drain_c{slots}": drain(storage, slots, scale)}

    return measure


def drain_mixed(storage: str, scale: float) -> Values:
    """One job in five has a sync handler, which runs on a thread."""
    return {"drain_mixed": drain(storage, 10, scale, names=(*ASYNC_NAMES[:4], "resize"))}


def yardstick(storage: str, scale: float) -> Values:
    """A bare PING, and the loop around a script of a few lines."""
    found: Values = {}
    with Site("redis") as site:
        assert site.server is not None
        with site.server.client() as client:
            found["ping_p50"] = Value(ping(client, int(3_000 * scale)) * 1e3, "ms")
        with redis.Redis(port=site.server.port) as bare:
            for slots, jobs in ((1, 5_000), (10, 30_000), (100, 100_000)):
                count = int(jobs * scale)
                before = time.process_time(), redis_usage(site.server)
                speed = bare_drain(bare, slots, count)
                used = time.process_time() - before[0], redis_usage(site.server) - before[1]
                cpu = {"worker": used[0] / count * 1e6, "redis": used[1] / count * 1e6}
                found[f"bare_c{slots}"] = Value(speed, "jobs/s", cpu)
    return found


def ping(client: Any, count: int) -> float:
    """Return the median seconds of a PING."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        client.ping()
        times.append(time.perf_counter() - start)
    return percentile(times, 50)


def latency(storage: str, scale: float) -> Values:
    """The time from an enqueue to the handler, and of `enqueue_and_wait`, with an idle worker."""
    count = max(10, int(60 * scale))
    with Site(storage) as site:
        if storage == "memory":
            site.client.call("work", None)
        else:
            site.start()
        site.client.call("pickup", 10)  # until the worker has started and all is warm
        site.client.call("roundtrip", 10)
        site.marks.clear()
        site.client.call("pickup", count)
        site.check()
        picked = site.marks.times()
        waited = site.client.call("roundtrip", count)
    return {
        f"{name}_p{share}": Value(percentile(times, share) * 1e3, "ms")
        for name, times in (("pickup", picked), ("enqueue_and_wait", waited))
        for share in (50, 95)
    }


def enqueue(storage: str, scale: float) -> Values:
    """Single enqueues, sync and awaited; a bulk enqueue, and what the waiting jobs take."""
    count = int(100_000 * scale)
    with Site(storage) as site:
        site.client.call("bulk", 2_000)
        few = int(3_000 * scale)
        found = {
            "enqueue_single": Value(site.client.call("single", few), "jobs/s"),
            "enqueue_awaited": Value(site.client.call("awaited", few), "jobs/s"),
        }
        if storage in (*DATABASES, "scheduler"):
            found["enqueue_durable"] = Value(site.client.call("single", few, True), "jobs/s")
        before = memory(site)
        found["enqueue_bulk"] = Value(site.client.call("bulk", count), "jobs/s")
        if storage in DATABASES:
            found["bare_bulk"] = Value(site.client.call("bare_bulk", count), "jobs/s")
        elif storage != "scheduler":
            found["bytes_per_waiting_job"] = Value((memory(site) - before) / count, "bytes")
        if site.server is not None:
            found["bare_bulk"] = Value(replayed(site, count), "jobs/s")
    return found


def memory(site: Site) -> int:
    """Return the bytes that Redis uses, or without one the producing process."""
    if site.server is not None:
        return int(site.server.run("INFO", "memory")["used_memory"])
    return int(site.client.call("resident"))


def replayed(site: Site, count: int) -> float:
    """Return the jobs per second of the calls of a bulk enqueue, recorded, on a bare socket."""
    assert site.server is not None
    site.server.run("FLUSHALL")
    with recording(site) as (proxy, producer):
        producer.call("bulk", count)
        requests = proxy.requests()
    site.server.run("FLUSHALL")
    took = replay(site.server, requests)
    if (found := site.client.call("waiting")) != count:
        raise RuntimeError(f"{found} of {count} jobs wait after their calls were repeated")
    return count / took


@contextmanager
def recording(site: Site) -> Iterator[tuple[RecordingProxy, Client]]:
    """Start a producer whose calls are recorded."""
    assert site.server is not None
    with RecordingProxy(site.server) as proxy:
        environment = {**site.environment, "BENCH_REDIS": proxy.url}
        with Client(site.folder, environment) as producer:
            yield proxy, producer


def two_processes(storage: str, scale: float) -> Values:
    """`--processes 2`, and two times `runworkers`."""
    return {
        "processes_2_c10": drain(storage, 10, scale, flags=("--processes", "2")),
        "processes_2_c100": drain(storage, 100, scale, flags=("--processes", "2")),
        "two_runworkers_c100": drain(storage, 100, scale, workers=2),
    }


def computing(storage: str, scale: float) -> Values:
    """Jobs that compute for a millisecond, in one process and in two."""
    found: Values = {}
    for name, flags in (("computing", ()), ("computing_processes_2", ("--processes", "2"))):
        with Site(storage) as site:
            count = int(COMPUTING * scale)
            site.client.call("fill", count, ["compute"])
            found[name] = rate(site.drain(count, *flags))
    return found


def request(storage: str, scale: float) -> Values:
    """What an enqueue takes in a request, in turns with what a project would do otherwise."""
    with Site(storage) as site:
        times = site.client.call("request", max(20, int(REQUESTS * scale)), site.url)
    return {name: Value(percentile(some, 50) * 1e3, "ms") for name, some in times.items()}


def beside(storage: str, scale: float) -> Values:
    """What a drain has beside it, one at a time; and the mirror off."""
    return {
        "with_priority_c100": drain(storage, 100, scale, prepare=("lower_priority",)),
        "with_limits_c100": drain(storage, 100, scale, prepare=("limits",)),
        "with_events_c100": drain(storage, 100, scale, prepare=("subscribe",)),
        "without_mirror_c100": drain(storage, 100, scale, mirror=False),
        "without_mirror_c10": drain(storage, 10, scale, mirror=False),
    }


def features(storage: str, scale: float) -> Values:
    """Jobs with limits, groups or unique keys."""
    return {
        "with_limits": drain(storage, 10, scale, prepare=("limits",)),
        "with_groups": drain(storage, 10, scale, fill="fill_groups"),
        "with_unique_keys": drain(storage, 10, scale / 2, fill="fill_unique"),
    }


def backlog(storage: str, scale: float) -> Values:
    """A million waiting jobs: what the start, a drain and the memory of `runworkers` have to do with them."""
    found: Values = {}
    for name, count in (("few", int(50_000 * scale)), ("many", int(MANY * scale))):
        with Site(storage) as site:
            for first in range(0, count, 50_000):
                site.client.call("bulk", min(50_000, count - first))
            start = time.perf_counter()
            worker = site.start()
            found[f"first_job_of_{name}"] = Value(site.marks.wait_for(1, site.check) - start, "s")
            found[f"drain_of_{name}"] = rate(
                site.marks.drain(min(count, 40_000), site.usage, site.check, LIMIT)
            )
            found[f"memory_of_{name}"] = Value(session_memory(worker.process.pid) / 2**20, "MiB")
    return found


MEASURES = {
    "yardstick": Measure(yardstick, ON_REDIS),
    "drain_c1": Measure(drain_at(1), needs=("yardstick",)),
    "drain_c10": Measure(drain_at(10), needs=("yardstick",)),
    "drain_c100": Measure(drain_at(100), needs=("yardstick",)),
    "drain_mixed": Measure(drain_mixed),
    "latency": Measure(latency, needs=("yardstick",)),
    "enqueue": Measure(enqueue),
    "request": Measure(request, (*ON_REDIS, *DATABASES)),
    "computing": Measure(computing, (*ON_REDIS, *DATABASES)),
    "two_processes": Measure(two_processes, ON_REDIS, needs=("drain_c10", "drain_c100")),
    "beside": Measure(beside, ON_REDIS, needs=("drain_c10", "drain_c100")),
    "features": Measure(features, DATABASES, needs=("drain_c10",)),
    "backlog": Measure(backlog, DATABASES),
}
RATIOS = [
    Ratio("redis", "c1 / bare loop", "drain_c1", "bare_c1", ">= 0.75"),
    Ratio("redis", "c10 / bare loop", "drain_c10", "bare_c10", ">= 0.7"),
    Ratio("redis", "c100 / bare loop", "drain_c100", "bare_c100", ">= 0.7"),
    Ratio("redis", "bulk / prepacked calls", "enqueue_bulk", "bare_bulk", ">= 0.75"),
    Ratio("redis", "pickup / PING", "pickup_p50", "ping_p50", "<= 5"),
    Ratio("redis", "enqueue_and_wait / PING", "enqueue_and_wait_p50", "ping_p50", "<= 12"),
    Ratio("redis", "--processes 2, c10", "processes_2_c10", "drain_c10"),
    Ratio("redis", "--processes 2, c100", "processes_2_c100", "drain_c100", ">= 1.4"),
    Ratio("redis", "two runworkers, c100", "two_runworkers_c100", "drain_c100", ">= 1.4"),
    Ratio("redis", "another priority", "with_priority_c100", "drain_c100", ">= 0.9"),
    Ratio("redis", "limits never reached", "with_limits_c100", "drain_c100", ">= 0.9"),
    Ratio("redis", "event subscriber", "with_events_c100", "drain_c100", ">= 0.9"),
    Ratio("redis", "mirror, c10", "drain_c10", "without_mirror_c10", ">= 0.85"),
    Ratio("redis", "mirror, c100", "drain_c100", "without_mirror_c100", ">= 0.85"),
    Ratio("redis", "enqueue / Celery's delay", "request_enqueue", "request_celery", "<= 0.5"),
    Ratio("sqlite", "c100 / c10", "drain_c100", "drain_c10", ">= 1"),
    Ratio("sqlite", "bulk / bare executemany", "enqueue_bulk", "bare_bulk", ">= 0.6"),
    Ratio("postgresql", "bulk / bare COPY", "enqueue_bulk", "bare_bulk", ">= 0.6"),
    *(
        Ratio(storage, "computing, two processes", "computing_processes_2", "computing", ">= 1.7")
        for storage in (*ON_REDIS, *DATABASES)
    ),
    *(
        Ratio(storage, name, of, to, goal)
        for storage in DATABASES
        for name, of, to, goal in (
            ("limits never reached", "with_limits", "drain_c10", ">= 0.6"),
            ("groups", "with_groups", "drain_c10", ">= 0.6"),
            ("unique keys", "with_unique_keys", "drain_c10", ">= 0.6"),
            ("enqueue / ORM create", "request_enqueue", "request_create", "<= 1.5"),
            (
                "the same in a transaction",
                "request_enqueue_atomic",
                "request_create_atomic",
                "<= 1.5",
            ),
            ("drain, a million waiting", "drain_of_many", "drain_of_few", ">= 0.9"),
            ("memory, a million waiting", "memory_of_many", "memory_of_few", "<= 1.1"),
        )
    ),
]
GOALS = {
    ("redis", "bytes_per_waiting_job"): "<= 330",
    ("memory", "bytes_per_waiting_job"): "<= 700",
    **{(storage, "first_job_of_few"): "<= 1" for storage in DATABASES},
    ("sqlite", "pickup_p50"): "<= 5",
    ("postgresql", "pickup_p50"): "<= 5",
    ("sqlite", "enqueue_single"): ">= 2950",
}


def main(options: argparse.Namespace) -> int:
    """Measure, print, and write the docs where that was asked for."""
    load = [os.getloadavg()[0]]
    found = list(rows(measure(options), RATIOS, GOALS))
    load.append(os.getloadavg()[0])
    for row in sorted(found, key=lambda row: row["unit"] != "ratio"):
        print(json.dumps(row) if options.json else shown(row), flush=True)
    if options.write_docs:
        print(f"Wrote {write_docs(found, options.runs, load)}", file=sys.stderr)
    return 0


def measure(options: argparse.Namespace) -> dict[str, list[Values]]:
    """Run all measurements that were asked for, in turns; a list with each run's values, by storage."""
    scale = 0.1 if options.quick else 1.0
    runs: dict[str, list[Values]] = {storage: [] for storage in options.storage or STORAGES}
    for number in range(options.runs):
        for storage, found in runs.items():
            values: Values = {}
            names = chosen(storage, options.metric)
            for name in names if number % 2 == 0 else names[::-1]:  # the machine may get slower meanwhile
                print(f"{number + 1}/{options.runs} {storage} {name}", file=sys.stderr, flush=True)
                values |= MEASURES[name].function(storage, scale)
            found.append(values)
    return runs


def chosen(storage: str, metrics: list[str] | None) -> list[str]:
    """Return the measurements of a storage that were asked for, with those that their ratios need."""
    wanted = list(metrics or MEASURES)
    for name in wanted:  # grows meanwhile
        wanted += [needed for needed in MEASURES[name].needs if needed not in wanted]
    return [name for name in MEASURES if name in wanted and storage in MEASURES[name].storages]
