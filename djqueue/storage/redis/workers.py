"""Live workers, their commands and their dumps."""

from collections.abc import Callable, Sequence
from typing import Any

from djqueue.core.metrics import RunStats
from djqueue.core.workers import (
    ASKED,
    DUMP_TTL,
    MAX_DUMP,
    ProcessInfo,
    RunningJob,
    WorkerDump,
    WorkerInfo,
    check_command,
)
from djqueue.storage.facets import WORKER_TTL, Unsubscribe, Workers

from . import records
from .keyspace import Keyspace
from .metrics import Metrics
from .records import pack_text, text
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script
from .subscriptions import RedisEvents


class RedisWorkers(Workers):
    """Live workers, in one hash of the deployment."""

    def __init__(self, keyspace: Keyspace, events: RedisEvents, metrics: Metrics) -> None:
        self._keyspace = keyspace
        self._events = events
        self._metrics = metrics

    def register(self, info: WorkerInfo) -> tuple[str, ...]:
        about = _pack(info)
        commands = self._keyspace.ask(self._worker(b"register", pack_text(info.id), about, info.started_at))
        return tuple(map(text, commands))

    def unregister(self, worker_id: str) -> None:
        self._keyspace.ask(self._worker(b"unregister", pack_text(worker_id)))

    def all(self) -> list[WorkerInfo]:
        return self._keyspace.run(self.live())

    def live(self) -> Steps[list[WorkerInfo]]:
        [entries] = yield [self._worker(b"list", WORKER_TTL, DUMP_TTL)]
        return [_info(entries[at], int(float(entries[at + 1]))) for at in range(0, len(entries), 2)]

    def control(self, worker_id: str, command: str) -> str:
        check_command(command)
        return self._keyspace.run(self._control(pack_text(worker_id), command))

    def _control(self, name: bytes, command: str) -> Steps[str]:
        [answer] = yield [self._worker(b"control", name, command.encode(), WORKER_TTL)]
        if answer == ASKED.encode():
            yield [RedisCommand((self._keyspace.publish, self._keyspace.common.commands.encode(), name))]
        return text(answer)

    def on_command(self, worker_id: str, wake: Callable[[], None]) -> Unsubscribe:
        return self._events.on_worker_command(worker_id, wake)

    def save_dump(self, worker_id: str, text: str) -> bool:
        kept = pack_text(text[:MAX_DUMP])
        return bool(self._keyspace.ask(self._worker(b"save_dump", pack_text(worker_id), kept)))

    def dump(self, worker_id: str) -> WorkerDump | None:
        kept = self._keyspace.ask(self._worker(b"dump", pack_text(worker_id), DUMP_TTL))
        return WorkerDump(int(float(kept[0])), text(kept[1])) if kept else None

    def record_runs(self, stats: Sequence[RunStats]) -> None:
        self._keyspace.run(self._metrics.record(stats))

    def _worker(self, *arguments: Any) -> ScriptCall:
        return ScriptCall(script("worker"), self._keyspace.common, arguments, sequence=False)


def _pack(info: WorkerInfo) -> bytes:
    lists = {"jobs": list(map(list, info.jobs)), "processes": list(map(list, info.processes))}
    return records.pack(list({**info._asdict(), **lists}.values()))


def _info(data: bytes, seen_at: int) -> WorkerInfo:
    # A worker of another version may have fewer or more fields.
    info = WorkerInfo(*records.unpack(data)[: len(WorkerInfo._fields)])
    return info._replace(
        queues=None if info.queues is None else tuple(info.queues),
        names=tuple(info.names),
        seen_at=seen_at,
        jobs=tuple(RunningJob(*job) for job in info.jobs),
        processes=tuple(ProcessInfo(*process) for process in info.processes),
    )
