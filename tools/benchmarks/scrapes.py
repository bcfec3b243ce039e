"""Scrapes of the metrics of very many jobs: see `pages`."""

import os
import time
from typing import Any

from tools.benchmarks.pages import quickest, seed

QUEUES = 20
BATCH = 50_000
TOKEN = "a-token-of-the-benchmarks"


def measure(name: str, given: Any, jobs: int, samples: int) -> None:
    """Milliseconds of a scrape and of the scaling signal, and the part of it that the reads take."""
    from django.test import override_settings

    from djqueue.conf import get_settings
    from djqueue.contrib.metrics import scaling

    os.environ["DJQUEUE_MONITORING_TOKEN"] = TOKEN
    storage, record = given
    began = time.perf_counter()
    seed(storage, record, 0, QUEUES)
    _fill(name, storage, jobs)
    storage.workers.all()
    print(f"{name:9} {jobs:,} jobs of {QUEUES} queues in {time.perf_counter() - began:.0f} s", flush=True)
    with override_settings(ROOT_URLCONF="djqueue.contrib.metrics.urls"):
        reads = {
            "scrape": lambda: _get("/metrics"),
            "scaling": lambda: _get("/scaling"),
            "overview": storage.reads.overview,
            "cumulative": storage.reads.cumulative,
            "workers": storage.workers.all,
            "workers wanted": lambda: scaling.read_scaling(storage, get_settings()),
        }
        for word, read in reads.items():
            print(f"{name:9} {word:20} {quickest(read, samples):8.2f} ms", flush=True)


def _get(url: str) -> None:
    from django.test import RequestFactory
    from django.urls import resolve

    view = resolve(url).func
    response = view(RequestFactory().get(url, headers={"authorization": f"Bearer {TOKEN}"}))
    assert response.status_code == 200, response.content


def _fill(name: str, storage: Any, jobs: int) -> None:
    if name == "database":
        from tools.benchmarks import lists

        lists.seed(0, jobs)
        return
    from djqueue.core.job import Batch
    from djqueue.core.options import JobOptions

    for place in range(0, jobs, BATCH):
        queue = f"queue-{place // BATCH % QUEUES:03}"
        storage.enqueue([Batch(queue, "job", JobOptions(), [b"\x80"] * 1_000) for _ in range(BATCH // 1_000)])
