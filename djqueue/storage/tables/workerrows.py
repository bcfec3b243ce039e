"""Rows of workers: conversion from and to the records of the contract."""

from typing import Any

from djqueue import models
from djqueue.core.durations import to_milliseconds
from djqueue.core.job import ProcessInfo, RunningJob, WorkerInfo

from .rows import TEXT_LIMIT, clean

WORKER = WorkerInfo._fields[: WorkerInfo._fields.index("kind")]
"""Fields of a worker with columns of their own; one column has the others."""


def worker_row(info: WorkerInfo) -> tuple[str, dict[str, Any]]:
    """Return a worker's id, and the other fields of its row."""
    values = {name: getattr(info, name) for name in WORKER[1:]}
    values["host"] = clean(info.host, TEXT_LIMIT)
    values["queues"] = None if info.queues is None else list(info.queues)
    values["names"] = list(info.names)
    about: dict[str, Any] = {name: getattr(info, name) for name in WorkerInfo._fields[len(WORKER) :]}
    about["jobs"] = [list(job) for job in info.jobs]
    about["processes"] = [list(process) for process in info.processes]
    return clean(info.id, TEXT_LIMIT), {**values, "about": about}


def worker_from_row(row: models.WorkerState) -> WorkerInfo:
    """Convert a row to a worker, and ignore fields of other versions of djqueue."""
    values = {name: getattr(row, name) for name in WORKER[1:]}
    values["queues"] = None if row.queues is None else tuple(row.queues)
    values["names"] = tuple(row.names)
    for name in ("started_at", "seen_at"):
        values[name] = to_milliseconds(values[name])
    about = {name: value for name, value in (row.about or {}).items() if name in WorkerInfo._fields}
    about["jobs"] = tuple(RunningJob(*job) for job in about.get("jobs", ()))
    about["processes"] = tuple(ProcessInfo(*process) for process in about.get("processes", ()))
    return WorkerInfo(row.worker_id, **values, **about)
