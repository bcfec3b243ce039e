"""What is measured, and on what."""

import asyncio
import gc
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import django
from django.conf import settings

QUEUE = "bench"
TEXT = "x" * 100


@dataclass(frozen=True)
class Measure:
    """A way to measure, and where it makes sense."""

    function: Callable[[Any, float], dict[str, float]]
    unit: str
    storages: tuple[str, ...] = ("memory", "redis")


def configure(folder: str) -> None:
    """A Django project on a SQLite file."""
    database = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(Path(folder) / "bench.sqlite3"),
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    }
    settings.configure(
        INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "djqueue"],
        DATABASES={"default": database},
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        USE_TZ=True,
    )
    django.setup()


@contextmanager
def memory() -> Iterator[Any]:
    """A storage in memory."""
    with tempfile.TemporaryDirectory() as folder:
        configure(folder)
        from djqueue.storage.memory import MemoryStorage

        yield MemoryStorage()


@contextmanager
def redis() -> Iterator[Any]:
    """A storage on a Redis of its own, as its package installs it but for snapshots."""
    from tests.servers import RedisServer

    with tempfile.TemporaryDirectory() as folder, RedisServer() as server:
        configure(folder)
        from djqueue.storage.redis import RedisStorage

        os.environ["DJQUEUE_BENCH_REDIS"] = server.url
        storage = RedisStorage(url=server.url)
        storage.connect()
        # The scripts are known to a server that has been running for a while.
        queue_of(storage).enqueue_many(payloads(3))
        drain(storage, 200, 10)
        queue_of(storage).obliterate()
        try:
            yield storage
        finally:
            storage.close()


STORAGES = {"memory": memory, "redis": redis}


def payloads(count: int) -> list[dict[str, Any]]:
    """What each job is given."""
    return [{"n": n, "user": f"user-{n}", "text": TEXT} for n in range(count)]


async def no_op(job: Any) -> dict[str, bool]:
    """The handler."""
    return {"ok": True}


def sync_no_op(job: Any) -> dict[str, bool]:
    """The handler, for threads."""
    return {"ok": True}


def queue_of(storage: Any) -> Any:
    """The queue that is measured."""
    from djqueue import Queue

    return Queue(QUEUE, storage=storage)


def written(storage: Any) -> None:
    """Wait until all is where it is to stay: a rate that leaves that out would be a lie."""
    storage.reads.counts(QUEUE)


def enqueue_seq(storage: Any, scale: float) -> dict[str, float]:
    """One job after the other, each awaited by its caller."""
    queue, entries = queue_of(storage), payloads(int(20_000 * scale))
    start = time.perf_counter()
    for entry in entries:
        queue.enqueue(entry)
    written(storage)
    return {"enqueue_seq": len(entries) / (time.perf_counter() - start)}


def enqueue_awaited(storage: Any, scale: float) -> dict[str, float]:
    """One job after the other by one coroutine, each awaited."""
    queue, entries = queue_of(storage), payloads(int(10_000 * scale))

    async def produce() -> float:
        start = time.perf_counter()
        for entry in entries:
            await queue.aenqueue(entry)
        return len(entries) / (time.perf_counter() - start)

    return {"enqueue_awaited": asyncio.run(produce())}


def enqueue_bulk(storage: Any, scale: float) -> dict[str, float]:
    """All in one call."""
    queue, entries = queue_of(storage), payloads(int(200_000 * scale))
    start = time.perf_counter()
    queue.enqueue_many(entries)
    written(storage)
    return {"enqueue_bulk": len(entries) / (time.perf_counter() - start)}


def drain(storage: Any, count: int, concurrency: int, handler: Any = no_op) -> float:
    """Jobs a second from the first claim to the last result."""
    from djqueue import Worker
    from djqueue.runtime.serving import serve

    queue = queue_of(storage)
    queue.enqueue_many(payloads(count))
    written(storage)
    worker = Worker(storage, [QUEUE], {QUEUE: handler}, concurrency=concurrency, max_jobs=count)
    start = time.perf_counter()
    serve(worker)  # as `runworkers` does
    written(storage)
    took = time.perf_counter() - start
    done = queue.counts()["completed"]
    if done < count:
        raise RuntimeError(f"{done} of {count} jobs completed")
    return count / took


def drain_at(concurrency: int, count: int) -> Callable[[Any, float], dict[str, float]]:
    """Drain at a concurrency."""

    def measure(storage: Any, scale: float) -> dict[str, float]:
        return {f"drain_c{concurrency}": drain(storage, int(count * scale), concurrency)}

    return measure


def drain_threads(storage: Any, scale: float) -> dict[str, float]:
    """Drain with a plain function on threads."""
    return {
        "drain_threads_c10": drain(storage, int(30_000 * scale), 10, sync_no_op),
        "drain_threads_c100": drain(storage, int(30_000 * scale), 100, sync_no_op),
    }


def drain_processes(storage: Any, scale: float) -> dict[str, float]:
    """The rate of two worker processes against that of one."""
    queue = queue_of(storage)
    rates = []
    for count in (1, 2):
        jobs = int(60_000 * scale)
        queue.enqueue_many(payloads(jobs))
        command = [sys.executable, "-m", "tools.benchmarks.worker"]
        workers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()
        start = time.perf_counter()
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in workers:
            worker.wait()
        # The last look at the empty queue is not work.
        rates.append(jobs / (time.perf_counter() - start))
        if queue.counts()["completed"] < jobs:
            raise RuntimeError("jobs were left")
        queue.obliterate()
    return {"drain_two_processes": rates[1] / rates[0]}


def drain_mirrored(storage: Any, scale: float) -> dict[str, float]:
    """The rate with a mirror at work, and with a subscriber to all events, against that without."""
    from django.core.management import call_command

    from djqueue.operations.mirror import Mirror

    call_command("migrate", verbosity=0)
    count = int(30_000 * scale)
    plain, mirrored, watched = [], [], []
    for _ in range(3):
        plain.append(drain(storage, count, 100))
        queue_of(storage).obliterate()
        stop = threading.Event()
        thread = threading.Thread(target=Mirror(storage, "default").run, args=(stop,))
        thread.start()
        mirrored.append(drain(storage, count, 100))
        stop.set()
        thread.join()
        queue_of(storage).obliterate()
        unsubscribe = storage.events.subscribe(QUEUE, lambda event: None)
        watched.append(drain(storage, count, 100))
        unsubscribe()
        queue_of(storage).obliterate()
    base = sorted(plain)[1]
    return {"drain_with_mirror": sorted(mirrored)[1] / base, "drain_with_events": sorted(watched)[1] / base}


def claim_ratio(storage: Any, scale: float) -> dict[str, float]:
    """What a claim of ten costs with a million waiting against that with a thousand."""
    from djqueue.core.job import ClaimRequest, Outcome

    queue, times = queue_of(storage), []
    request = ClaimRequest("bench", 10, frozenset({QUEUE}), (QUEUE,))
    for count in (1_000, int(1_000_000 * scale)):
        for start in range(0, count, 100_000):
            queue.enqueue_many(payloads(min(100_000, count - start)))
        samples = []
        for _ in range(60):
            before = time.perf_counter()
            claims = storage.claim(request)
            samples.append(time.perf_counter() - before)
            storage.finish([Outcome(QUEUE, job.id, job.token, "complete", b"") for job in claims.jobs])
        times.append(percentile(samples, 50))
        queue.obliterate()
    return {"claim_ratio_1m": times[1] / times[0]}


def yardstick(storage: Any, scale: float) -> dict[str, float]:
    """What this machine's Redis does at best: a bare call, and jobs moved by a script of a few lines."""
    import redis as client_of

    client = client_of.Redis.from_url(os.environ["DJQUEUE_BENCH_REDIS"])
    count = int(3_000 * scale)
    start = time.perf_counter()
    for _ in range(count):
        client.ping()
    ping = (time.perf_counter() - start) / count * 1e6
    found = {"redis_ping_us": ping}
    for slots, jobs in ((1, 3_000), (10, 20_000), (100, 100_000)):
        found[f"redis_bare_drain_c{slots}"] = bare_drain(client, slots, int(jobs * scale))
    return found


def bare_drain(client: Any, slots: int, jobs: int) -> float:
    """Jobs a second that one loop moves, each call ending `slots` jobs and claiming as many."""
    script = client.register_script(BARE)
    blob = b"x" * 160
    for first in range(0, jobs, 1_000):
        ids = [b"%036d" % n for n in range(first, min(first + 1_000, jobs))]
        client.hset("bare:jobs", mapping=dict.fromkeys(ids, blob))
        client.rpush("bare:waiting", *ids)
    done: list[Any] = []
    moved = 0
    start = time.perf_counter()
    while moved < jobs:
        found = script(
            keys=["bare:waiting", "bare:jobs", "bare:leases", *[b"bare:r:" + job_id for job_id in done]],
            args=[slots, *done],
        )
        done = found[::2]
        moved += len(done)
    rate = jobs / (time.perf_counter() - start)
    client.flushdb()
    return rate


BARE = """
local ended = {unpack(ARGV, 2)}
for i = 1, #ended do redis.call('SET', KEYS[3 + i], 'ok', 'PX', '3600000') end
if #ended > 0 then redis.call('ZREM', KEYS[3], unpack(ended)) redis.call('HDEL', KEYS[2], unpack(ended)) end
local ids = redis.call('LPOP', KEYS[1], ARGV[1]) or {}
local found, leases = {}, {}
if #ids > 0 then
  local blobs = redis.call('HMGET', KEYS[2], unpack(ids))
  for i = 1, #ids do
    found[2 * i - 1], found[2 * i] = ids[i], blobs[i]
    leases[2 * i - 1], leases[2 * i] = '1800000000000', ids[i]
  end
  redis.call('ZADD', KEYS[3], unpack(leases))
end
return found
"""


def drain_ratio(storage: Any, scale: float) -> dict[str, float]:
    """The rate with a million waiting against that with ten thousand."""
    queue = queue_of(storage)
    rates = []
    for count in (10_000, int(1_000_000 * scale)):
        samples = 10 if count == 10_000 else 1
        rate = [drain(storage, count, 100) for _ in range(samples)]
        rates.append(sorted(rate)[len(rate) // 2])
        queue.obliterate()
    return {"drain_ratio_1m": rates[1] / rates[0]}


def memory_of_waiting(storage: Any, scale: float) -> dict[str, float]:
    """Resident memory of this process for each waiting job."""
    queue = queue_of(storage)
    queue.enqueue_many(payloads(1_000))
    count = int(300_000 * scale)
    gc.collect()
    used = resident if "DJQUEUE_BENCH_REDIS" not in os.environ else redis_memory
    before = used()
    for start in range(0, count, 10_000):
        queue.enqueue_many({"n": n, "user": f"user-{n}", "text": TEXT} for n in range(start, start + 10_000))
    written(storage)
    gc.collect()
    return {"bytes_per_waiting_job": (used() - before) / count}


def redis_memory() -> int:
    """Bytes that Redis uses."""
    import redis as client_of

    info = client_of.Redis.from_url(os.environ["DJQUEUE_BENCH_REDIS"]).info("memory")
    return int(info["used_memory"])


def resident() -> int:
    """Bytes that this process has in memory."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def pickup(storage: Any, scale: float) -> dict[str, float]:
    """Milliseconds from the enqueue, by another thread, to the start of the handler; the queue is idle."""
    queue = queue_of(storage)
    started = threading.Event()
    at = [0.0]

    async def handler(job: Any) -> None:
        at[0] = time.perf_counter()
        started.set()

    times = []
    with running(storage, handler):
        for entry in payloads(max(50, int(1_000 * scale))):
            started.clear()
            before = time.perf_counter()
            queue.enqueue(entry)
            if not started.wait(10):
                raise RuntimeError("the job was not picked up")
            times.append((at[0] - before) * 1e3)
            idle()
    return {"pickup_p50": percentile(times, 50), "pickup_p99": percentile(times, 99)}


def roundtrip(storage: Any, scale: float) -> dict[str, float]:
    """Milliseconds of `enqueue_and_wait`, with the queue idle."""
    queue = queue_of(storage)
    times = []
    with running(storage, no_op):
        for entry in payloads(max(50, int(1_000 * scale))):
            before = time.perf_counter()
            queue.enqueue_and_wait(entry, wait=10)
            times.append((time.perf_counter() - before) * 1e3)
    return {"roundtrip_p50": percentile(times, 50), "roundtrip_p99": percentile(times, 99)}


def drain_limited(storage: Any, scale: float) -> dict[str, float]:
    """The rate of a queue with limits that are never reached against that of one without, in turns."""
    from djqueue.core.policies import Rate

    count = int(30_000 * scale)
    rates: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(5):
        for limited in (False, True):
            limits = (Rate(10_000_000, 1_000), 100_000) if limited else (None, None)
            storage.queues.set_limits(QUEUE, *limits)
            rates[limited].append(drain(storage, count, 100))
            queue_of(storage).obliterate()
    return {"drain_limited": max(rates[True]) / max(rates[False])}


def drain_shared_limiter(storage: Any, scale: float) -> dict[str, float]:
    """The rate of a queue whose shared limiter never binds against that of one without, in turns."""
    from djqueue.core.policies import QueuePolicy, Rate

    count = int(30_000 * scale)
    storage.limiters.set("shared", Rate(10_000_000, 1_000), 100_000)
    rates: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(5):
        for shared in (False, True):
            policy = QueuePolicy(limiter="shared" if shared else None)
            # The queue was obliterated: it begins with this policy.
            place = storage.engine.context if hasattr(storage, "engine") else storage._keyspace
            place.policies[QUEUE] = policy
            rates[shared].append(drain(storage, count, 100))
            queue_of(storage).obliterate()
    return {"drain_shared_limiter": max(rates[True]) / max(rates[False])}


def worked() -> float:
    """Seconds of processor time that this process has used, and its Redis, if there is one."""
    used = time.process_time()
    if url := os.environ.get("DJQUEUE_BENCH_REDIS"):
        import redis

        with redis.Redis.from_url(url) as server:
            found = server.info("cpu")
        used += found["used_cpu_user"] + found["used_cpu_sys"]
    return used


def claim_beside_blocked(storage: Any, scale: float) -> dict[str, float]:
    """What a claim and an end cost beside 50,000 blocked jobs of one group, against that without them:
    blocked by the group's limit, and by its rate. In processor time: others that use the machine make
    single runs twice as long.
    """
    from djqueue.core.job import Batch, ClaimRequest, Outcome
    from djqueue.core.options import JobOptions
    from djqueue.core.policies import Rate

    rounds = max(100, int(2_000 * scale))
    beside = {name: f"{QUEUE}:{name}" for name in ("alone", "blocked", "rated")}

    def request(queue: str) -> Any:
        return ClaimRequest("bench", 1, frozenset({QUEUE}), (queue,))

    def fill(queue: str, group: str, count: int) -> None:
        storage.enqueue([Batch(queue, QUEUE, JobOptions(concurrency_key=group), [b""] * count)])

    def measure(queue: str) -> float:
        for number in range(rounds):
            fill(queue, f"small:{number}", 1)
        start = worked()
        for _ in range(rounds):
            [job] = storage.claim(request(queue)).jobs
            storage.finish([Outcome(queue, job.id, job.token, "complete")])
        return worked() - start

    storage.queues.set_key_limit(beside["rated"], "big", concurrency=100, rate=Rate(1, 86_400_000))
    for queue in (beside["blocked"], beside["rated"]):
        fill(queue, "big", 50_000)
        storage.claim(request(queue))
    best = dict.fromkeys(beside, float("inf"))
    for _ in range(5):
        for name, queue in beside.items():
            best[name] = min(best[name], measure(queue))
    return {
        "claim_beside_blocked": best["blocked"] / best["alone"],
        "claim_beside_rated": best["rated"] / best["alone"],
    }


def overview(storage: Any, scale: float) -> dict[str, float]:
    """Milliseconds of an overview of 100 queues, and what one of 200 costs a queue against one of 20."""
    from djqueue import Queue

    names = [f"{QUEUE}-{number:03}" for number in range(200)]
    for name in names:
        Queue(name, storage=storage).enqueue_many(payloads(10))

    def measure(count: int) -> float:
        samples = []
        for _ in range(max(10, int(100 * scale))):
            before = time.perf_counter()
            storage.reads.overview(names[:count])
            samples.append((time.perf_counter() - before) * 1_000)
        return percentile(samples, 50)

    few, hundred, many = measure(20), measure(100), measure(200)
    return {"overview_100": hundred, "overview_growth": many / few / 10}


@contextmanager
def running(storage: Any, handler: Any) -> Iterator[None]:
    """A worker on a thread of its own."""
    from djqueue import Worker

    worker = Worker(storage, [QUEUE], {QUEUE: handler}, concurrency=10)
    worker.start()
    try:
        yield
    finally:
        worker.stop()


def idle() -> None:
    """Let the worker find nothing and go to sleep."""
    threading.Event().wait(0.002)


def percentile(values: list[float], share: int) -> float:
    """The value below which so many percent lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)]


MEASURES = {
    "enqueue_seq": Measure(enqueue_seq, "jobs/s"),
    "enqueue_bulk": Measure(enqueue_bulk, "jobs/s"),
    "drain_c1": Measure(drain_at(1, 10_000), "jobs/s"),
    "drain_c10": Measure(drain_at(10, 50_000), "jobs/s"),
    "drain_c100": Measure(drain_at(100, 100_000), "jobs/s"),
    "drain_threads": Measure(drain_threads, "jobs/s"),
    "pickup": Measure(pickup, "ms"),
    "roundtrip": Measure(roundtrip, "ms"),
    "enqueue_awaited": Measure(enqueue_awaited, "jobs/s", ("redis",)),
    "drain_processes": Measure(drain_processes, "ratio", ("redis",)),
    "drain_mirrored": Measure(drain_mirrored, "ratio", ("redis",)),
    "claim_ratio_1m": Measure(claim_ratio, "ratio", ("redis",)),
    "drain_limited": Measure(drain_limited, "ratio"),
    "drain_shared_limiter": Measure(drain_shared_limiter, "ratio"),
    "claim_beside_blocked": Measure(claim_beside_blocked, "ratio"),
    "overview": Measure(overview, "ms"),
    "yardstick": Measure(yardstick, "", ("redis",)),
    "bytes_per_waiting_job": Measure(memory_of_waiting, "bytes"),
    "drain_ratio_1m": Measure(drain_ratio, "ratio", ("memory",)),
}
