"""The Prometheus collector, which reads the storage at each scrape, and limits the number of its labels."""

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import accumulate
from typing import NamedTuple

from djqueue import __version__
from djqueue.client import get_storage
from djqueue.conf import Settings, get_settings
from djqueue.core.metrics import BOUNDS, NO_TIMES, OTHERS, Bucket, Histogram
from djqueue.core.overview import Overview
from djqueue.core.states import State
from djqueue.core.workers import WorkerInfo
from djqueue.storage.base import Storage

from .scaling import scaling

try:
    from prometheus_client import Metric
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("Metrics need prometheus_client: pip install 'djqueue[metrics]'") from error

WORKER_STATES = ("running", "quiet", "stopping")
PROCESSED = ("completed", "retried", "failed", "cancelled", "stalled")
"""Outcomes of jobs and attempts, as fields of `Bucket`."""
ENDINGS = ("completed", "retried", "failed", "cancelled")
"""Outcomes that workers report by job name, as fields of `Bucket`."""
LIMITS = (*(str(bound / 1_000) for bound in BOUNDS[::2]), "+Inf")
"""Upper ends of the parts of histograms, in seconds: every second one, which halves the time series."""
MAX_QUEUES = 50
"""Maximum number of queues with labels of their own."""
MAX_JOBS = 50
"""Maximum number of job names of queues with labels of their own."""
OTHER = "other"
"""Label of all other queues, and of all other jobs of a queue."""


class Definition(NamedTuple):
    """A metric."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily]
    labels: tuple[str, ...]
    help: str

    def family(self, name: str) -> Metric:
        """Return the metric without samples."""
        return self.kind(name, self.help, labels=self.labels)


DEFINITIONS = {
    "djqueue_jobs": Definition(GaugeMetricFamily, ("queue", "state"), "Number of jobs."),
    "djqueue_queue_latency_seconds": Definition(
        GaugeMetricFamily, ("queue",), "Time that the oldest claimable job has waited; 0 if there is none."
    ),
    "djqueue_queue_paused": Definition(GaugeMetricFamily, ("queue",), "1 if the queue is paused."),
    "djqueue_dead_letters": Definition(GaugeMetricFamily, ("queue",), "Number of dead letters."),
    "djqueue_jobs_enqueued": Definition(CounterMetricFamily, ("queue",), "Jobs enqueued, or moved here."),
    "djqueue_jobs_processed": Definition(
        CounterMetricFamily,
        ("queue", "outcome"),
        "Jobs completed, failed and cancelled; attempts retried and stalled.",
    ),
    "djqueue_job_wait_seconds": Definition(
        HistogramMetricFamily, ("queue",), "Time from when a job could be claimed to its first start."
    ),
    "djqueue_job_duration_seconds": Definition(
        HistogramMetricFamily, ("queue", "job"), "Duration of ended attempts."
    ),
    "djqueue_job_attempts": Definition(
        CounterMetricFamily, ("queue", "job", "outcome"), "Attempts that workers reported as ended."
    ),
    "djqueue_workers": Definition(GaugeMetricFamily, ("state",), "Number of live workers."),
    "djqueue_worker_slots": Definition(GaugeMetricFamily, (), "Jobs that live workers can run at once."),
    "djqueue_worker_active_jobs": Definition(GaugeMetricFamily, (), "Jobs that live workers are running."),
    "djqueue_workers_wanted": Definition(
        GaugeMetricFamily, (), "Number of workers with which all queues would keep their OBJECTIVE."
    ),
    "djqueue_build_info": Definition(GaugeMetricFamily, ("version",), "1, with the version of djqueue."),
}
"""Every metric, by name. The exposition adds `_total` to counters."""


class DjqueueCollector(Collector):
    """Reads the metrics of the project's storage; register one in any registry.

        from prometheus_client import REGISTRY

        REGISTRY.register(DjqueueCollector())

    storage: another storage than the project's.
    """

    def __init__(self, storage: Storage | None = None) -> None:
        self._storage = storage

    def describe(self) -> list[Metric]:
        """Return the metrics without samples, so that registering the collector reads nothing."""
        return [definition.family(name) for name, definition in DEFINITIONS.items()]

    def collect(self) -> Iterator[Metric]:
        """Read the storage, and return the metrics. Raises the errors of its reads."""
        storage = self._storage or get_storage()
        reads = storage.reads
        scrape = _Scrape(get_settings(), reads.overview(), reads.cumulative(), storage.workers.all())
        wanted = scaling(storage, scrape.settings, scrape.overview, scrape.workers, scrape.cumulative)
        scrape.read(wanted.workers)
        yield from scrape.families.values()


class _Scrape:
    """The metrics of one scrape, from what was read for it."""

    def __init__(
        self,
        settings: Settings,
        overview: Overview,
        cumulative: Sequence[Bucket],
        workers: Sequence[WorkerInfo],
    ) -> None:
        self.settings = settings
        self.overview = overview
        self.cumulative = cumulative
        self.workers = workers
        self.families = {name: definition.family(name) for name, definition in DEFINITIONS.items()}
        self._labels = Labels(
            [*(row.name for row in overview.queues), *(bucket.queue for bucket in cumulative)],
            [*settings.queues],
            [(bucket.queue, bucket.name) for bucket in cumulative if bucket.name],
        )

    def read(self, wanted: int) -> None:
        """Add all samples. wanted: number of workers."""
        self._read_queues()
        self._read_totals()
        self._read_jobs()
        self._read_workers(wanted)
        self._add("djqueue_build_info", (__version__,), 1)

    def _read_queues(self) -> None:
        labels = [*dict.fromkeys(map(self._labels.queue, self._every_queue()))]
        counts = {(label, state): 0 for label in labels for state in State}
        ages, paused = dict.fromkeys(labels, 0), dict.fromkeys(labels, 0)
        for row in self.overview.queues:
            label = self._labels.queue(row.name)
            for state, count in row.counts.items():
                counts[label, state] += count
            if row.oldest_at is not None:
                ages[label] = max(ages[label], self.overview.at - row.oldest_at)
            paused[label] = max(paused[label], int(row.paused))
        for (label, state), count in counts.items():
            self._add("djqueue_jobs", (label, state.value), count)
        for label in labels:
            self._add("djqueue_dead_letters", (label,), counts[label, State.FAILED])
            self._add("djqueue_queue_latency_seconds", (label,), ages[label] / 1_000)
            self._add("djqueue_queue_paused", (label,), paused[label])

    def _read_totals(self) -> None:
        by_queue: dict[str, list[Bucket]] = {self._labels.queue(name): [] for name in self._every_queue()}
        for bucket in self.cumulative:
            if not bucket.name:
                by_queue[self._labels.queue(bucket.queue)].append(bucket)
        for label, buckets in by_queue.items():
            self._add("djqueue_jobs_enqueued", (label,), sum(bucket.enqueued for bucket in buckets))
            for outcome in PROCESSED:
                self._add("djqueue_jobs_processed", (label, outcome), _sum(buckets, outcome))
            self._add_times("djqueue_job_wait_seconds", (label,), [bucket.wait for bucket in buckets])

    def _read_jobs(self) -> None:
        by_job: dict[tuple[str, str], list[Bucket]] = {}
        for bucket in self.cumulative:
            if bucket.name:
                label = self._labels.queue(bucket.queue), self._labels.job(bucket.queue, bucket.name)
                by_job.setdefault(label, []).append(bucket)
        for label, buckets in by_job.items():
            self._add_times("djqueue_job_duration_seconds", label, [bucket.run for bucket in buckets])
            for outcome in ENDINGS:
                self._add("djqueue_job_attempts", (*label, outcome), _sum(buckets, outcome))

    def _read_workers(self, wanted: int) -> None:
        for state in WORKER_STATES:
            self._add("djqueue_workers", (state,), sum(worker.state == state for worker in self.workers))
        self._add("djqueue_worker_slots", (), sum(worker.concurrency for worker in self.workers))
        self._add("djqueue_worker_active_jobs", (), sum(worker.active for worker in self.workers))
        self._add("djqueue_workers_wanted", (), wanted)

    def _every_queue(self) -> Iterator[str]:
        yield from self.settings.queues
        yield from (row.name for row in self.overview.queues)
        yield from (bucket.queue for bucket in self.cumulative)

    def _add(self, name: str, labels: Sequence[str], value: float) -> None:
        self.families[name].add_metric(labels, value)  # type: ignore[attr-defined]

    def _add_times(self, name: str, labels: Sequence[str], times: Iterable[Histogram]) -> None:
        together = reduce(Histogram.merge, times, NO_TIMES)
        rising = [*accumulate(together.counts)]
        parts = zip(LIMITS, [*rising[:-1:2], rising[-1]], strict=True)
        self.families[name].add_metric(labels, [*parts], together.sum / 1_000)  # type: ignore[attr-defined]


class Labels:
    """Labels of queues and jobs.

    The same names always get the same labels, in every process and after every restart, so that counters
    only rise. Queues of the settings come first, then the others by name.

    queues: all queues.
    configured: queues of the settings.
    jobs: queues and names of jobs.
    """

    def __init__(
        self, queues: Iterable[str], configured: Sequence[str], jobs: Iterable[tuple[str, str]]
    ) -> None:
        known = set(queues) | set(configured)
        ordered = [*dict.fromkeys(configured), *sorted(known.difference(configured))]
        self._positions = {name: position for position, name in enumerate(ordered[:MAX_QUEUES])}
        named = {(queue, name) for queue, name in jobs if queue in self._positions and name != OTHERS}
        self._jobs = set(sorted((self._positions[queue], name) for queue, name in named)[:MAX_JOBS])

    def queue(self, name: str) -> str:
        """Return the label of a queue."""
        return printable(name) if name in self._positions else OTHER

    def job(self, queue: str, name: str) -> str:
        """Return the label of a job's name in its queue."""
        return printable(name) if (self._positions.get(queue), name) in self._jobs else OTHER


def printable(name: str) -> str:
    """Return a name as valid Unicode: names from file names may have lone surrogates."""
    return name.encode(errors="replace").decode()


def _sum(buckets: Iterable[Bucket], field: str) -> int:
    return sum(getattr(bucket, field) for bucket in buckets)
