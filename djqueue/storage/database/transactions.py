"""Jobs that are enqueued in the caller's transaction."""

from asgiref.sync import sync_to_async
from django.db import connections

from djqueue.core.job import Batch
from djqueue.storage import commits
from djqueue.storage.capabilities import TransactionalEnqueue


class JoinedTransactions(TransactionalEnqueue):
    """Jobs are rows in the caller's transaction, unless `durable` is False."""

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def alias_for(self, batch: Batch) -> str | None:
        is_detached = batch.options.durable is False
        return self._alias if connections[self._alias].in_atomic_block and not is_detached else None

    async def aalias_for(self, batch: Batch) -> str | None:
        return await sync_to_async(self.alias_for)(batch)

    def uncommitted_in(self, queue: str, id: str) -> str | None:
        return self._alias if commits.has_uncommitted(self._alias, queue, id) else None

    async def auncommitted_in(self, queue: str, id: str) -> str | None:
        return await sync_to_async(self.uncommitted_in)(queue, id)
