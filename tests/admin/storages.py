"""A storage that shows what the admin asks of it."""

from collections.abc import Sequence
from typing import ClassVar

from djqueue.core.job import CancelResult
from djqueue.storage.memory import MemoryStorage


class Recorder(MemoryStorage):
    """Notes (verb, queue, ids) in `calls` and says that all is done, until `failing` is raised."""

    calls: ClassVar[list[tuple[str, str, list[str]]]] = []
    failing: ClassVar[Exception | None] = None

    def cancel(self, queue: str, ids: Sequence[str], reason: str = "cancelled") -> list[CancelResult]:
        self._note("cancel", queue, ids)
        return [CancelResult(job_id, "cancelled") for job_id in ids]

    def promote(self, queue: str, ids: Sequence[str]) -> list[bool]:
        self._note("promote", queue, ids)
        return [True for _ in ids]

    def retry(self, queue: str, ids: Sequence[str]) -> list[str]:
        self._note("retry", queue, ids)
        return ["retried" for _ in ids]

    def remove(self, queue: str, ids: Sequence[str]) -> list[bool]:
        self._note("remove", queue, ids)
        return [True for _ in ids]

    def pause(self, queue: str) -> None:
        self._note("pause", queue, [])

    def resume(self, queue: str) -> None:
        self._note("resume", queue, [])

    def _note(self, verb: str, queue: str, ids: Sequence[str]) -> None:
        if self.failing is not None:
            raise self.failing
        self.calls.append((verb, queue, list(ids)))
