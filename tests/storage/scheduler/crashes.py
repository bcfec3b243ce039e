"""End a scheduler of this process as if its process were killed, and wait for the next one."""

from djqueue import models
from djqueue.core.errors import StorageUnavailableError
from djqueue.storage.scheduler import SchedulerStorage, server
from djqueue.storage.tables.leaderlease import LeaderLeaseLostError
from djqueue.testing.factories import QUEUE


def crash(storage: SchedulerStorage) -> None:
    """Let a scheduler write nothing more, and close its connections."""
    scheduler, listening = storage._scheduler, storage._server
    assert scheduler is not None
    assert listening is not None
    scheduler.journal._write = _killed  # type: ignore[method-assign]
    scheduler.journal._closing = True  # ends its thread
    storage._scheduler = storage._server = None
    listening._is_closed = True
    server._shut(listening._listener)
    listening._listener.close()
    for session in list(listening._sessions):
        server._shut(session.connection)


def answers(client: SchedulerStorage) -> bool:
    """Whether a scheduler answers a client, which has told it then of its attempts."""
    try:
        return bool(client.reads.counts(QUEUE))
    except StorageUnavailableError:
        return False


def end_lease() -> None:
    """Let another scheduler take over, as from a process that has died."""
    models.LeaderLeaseRow.objects.filter(name="scheduler").update(expires_at=0)


def _killed(*_: object) -> None:
    raise LeaderLeaseLostError
