"""Rows of workers: conversion from and to the records of the contract."""

from typing import Any

from djqueue.core.workers import WorkerInfo

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
