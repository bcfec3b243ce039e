"""What a worker is told by way of the storage: claim no more, claim again, end, say where it is."""

from collections.abc import Callable
from datetime import UTC, datetime
from os import getpid
from platform import python_version

from djqueue._version import __version__
from djqueue.core.job import WorkerInfo
from djqueue.core.workercontrol import DUMP, QUIET, RESUME, STOP

from .stacks import stacks
from .workercontext import WorkerContext


class WorkerControl:
    """Does each command as it comes, on the thread of the heartbeat: also while the loop is held up.

    rest: claims no more, or claims again.
    stop: ends the worker, as a first signal does.
    """

    def __init__(
        self,
        worker_context: WorkerContext,
        *,
        info: Callable[[], WorkerInfo],
        rest: Callable[[bool], None],
        stop: Callable[[], None],
    ) -> None:
        self._storage = worker_context.storage
        self._loop = worker_context.loop
        self._clock = worker_context.clock
        self._tell = worker_context.tell
        self._info = info
        self._rest = rest
        self._stop = stop

    def obey(self, command: str) -> None:
        """Do what is said; a word of a later version is logged."""
        self._tell.steered(command)
        if command == QUIET:
            self._rest(True)
        elif command == RESUME:
            self._rest(False)
        elif command == STOP:
            self._stop()
        elif command == DUMP:
            self._dump()
        else:
            self._tell.not_understood(command)

    def _dump(self) -> None:
        info = self._info()
        try:
            self._storage.workers.save_dump(info.id, stacks(self._heading(info), self._loop))
        except Exception as error:
            # The storage is away, or a thread was in the middle of something: the other commands are done.
            self._tell.dump_failed(error)

    def _heading(self, info: WorkerInfo) -> str:
        now = self._clock.now()
        at = datetime.fromtimestamp(now / 1_000, UTC).isoformat(timespec="seconds")
        lines = [
            f"Worker {info.id}, process {getpid()}, {info.state}, at {at}",
            f"djqueue {__version__}, Python {python_version()}",
            f"{info.active} of {info.concurrency} slots in use",
        ]
        lines += [
            f"  {job.name} [{job.id}] of queue {job.queue}, for {(now - job.started_at) / 1_000:.1f} s"
            for job in info.jobs
        ]
        return "\n".join(lines) + "\n"
