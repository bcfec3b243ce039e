"""The storage of a process with permissions: it enqueues through the worker, and refuses everything else."""

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from djqueue.core.job import (
    Batch,
    ClaimRequest,
    Emission,
    EnqueueResult,
    Finished,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
    Swept,
)
from djqueue.storage.base import P, Storage, T, Unsubscribe
from djqueue.storage.capabilities import Capabilities

from .batches import frames_of, read_answer, requests_of

if TYPE_CHECKING:
    from djqueue.storage.facets import Events, Jobs, Limiters, Queues, Workers
    from djqueue.storage.reads import Reads
    from djqueue.storage.snapshots import Snapshots


class RequestLink(Protocol):
    """The part of the link to the worker that the storage uses."""

    def request(self, data: bytes) -> list[Any]:
        """Send the frames of a request, and return the answer."""


class LinkStorage(Storage):
    """The storage that handlers get in a process with permissions.

    max_payload: Maximum bytes of a job's payload.
    pid: Id of the process that the worker talks to; processes forked from it share its socket.
    """

    jobs: "Jobs"
    queues: "Queues"
    limiters: "Limiters"
    workers: "Workers"
    reads: "Reads"
    events: "Events"
    snapshots: "Snapshots"

    capabilities = Capabilities(relayed=True)

    def __init__(self, link: RequestLink, max_payload: int, pid: int) -> None:
        self._link = link
        self._max_payload = max_payload
        self._pid = pid
        for facet in ("jobs", "queues", "limiters", "workers", "reads", "events", "snapshots"):
            setattr(self, facet, RefusingFacet(facet))

    def describe(self) -> str:
        return "the worker, for a job with permissions"

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        # A thread would outlive the job, and every method either refuses or only waits for the worker.
        return method(*args, **kwargs)

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        if os.getpid() != self._pid:
            raise PermissionError(
                errno.EACCES, "a process that a job with permissions has started cannot enqueue jobs"
            )
        results: list[EnqueueResult] = []
        for request in requests_of(batches, self._max_payload) if batches else ():
            _, code, text, found = self._link.request(frames_of(request))
            results += read_answer(code, text, found)
        return results

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        _refuse("finish")

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        _refuse("renew")

    def report(self, reports: Sequence[ProgressReport]) -> Sequence[bool | None]:
        _refuse("report")

    def emit(self, emissions: Sequence[Emission]) -> Sequence[bool | None]:
        _refuse("emit")

    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        _refuse("listen")

    def sweep(self) -> Swept:
        _refuse("sweep")


class RefusingFacet:
    """A facet of the storage whose operations all raise PermissionError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, operation: str) -> Any:
        if operation.startswith("__"):
            raise AttributeError(operation)

        def refuse(*_: object, **__: object) -> NoReturn:
            _refuse(f"{self._name}.{operation}")

        return refuse


def _refuse(operation: str) -> NoReturn:
    raise PermissionError(
        errno.EACCES,
        f"the permissions of this job do not include {operation}: a job with permissions can enqueue jobs, "
        "but not wait for them, read them or change them. See Permissions(enqueue=...)",
    )
