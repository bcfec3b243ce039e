"""Find the caller's open transaction that has to commit before a job can start."""

from dataclasses import replace

from asgiref.sync import sync_to_async

from djqueue.conf import has_django
from djqueue.core.errors import OptionError, WaitInTransactionError
from djqueue.core.job import Batch
from djqueue.core.suggest import nearest
from djqueue.storage.base import Storage
from djqueue.storage.capabilities import TransactionalEnqueue

When = bool | str
"""The option `enqueue_on_commit`: False; True for the storage's database, or `default`; or an alias."""


def open_alias(storage: Storage, when: When) -> str | None:
    """Return the alias of the database to wait for; None if the caller has no transaction there."""
    if not when or not has_django():
        return None
    from django.db import connections

    alias = when if isinstance(when, str) else storage.capabilities.database or "default"
    if alias not in connections.settings:
        raise OptionError(
            f"enqueue_on_commit: {alias!r} is not one of DATABASES{nearest(alias, connections.settings)}"
        )
    connection = connections[alias]
    # In a transaction managed by hand, Django's `on_commit` raises an error that says so.
    is_by_hand = connection.connection is not None and not connection.autocommit
    return alias if connection.in_atomic_block or is_by_hand else None


async def aopen_alias(storage: Storage, when: When) -> str | None:
    """Async version of `open_alias`."""
    return await sync_to_async(open_alias)(storage, when) if when else None


def check_waiting(storage: Storage, batch: Batch, when: When) -> None:
    """Raise WaitInTransactionError if the job would start only after the caller's transaction commits."""
    joins = storage.capabilities.transactions
    alias = joins.alias_for(_held_up(joins, batch)) or open_alias(storage, when)
    _refuse(batch, alias, when, can_leave=joins.can_leave)


async def acheck_waiting(storage: Storage, batch: Batch, when: When) -> None:
    """Async version of `check_waiting`."""
    joins = storage.capabilities.transactions
    alias = await joins.aalias_for(_held_up(joins, batch)) or await aopen_alias(storage, when)
    _refuse(batch, alias, when, can_leave=joins.can_leave)


def _held_up(joins: TransactionalEnqueue, batch: Batch) -> Batch:
    """Return a batch that joins a transaction which would hold up this one."""
    if joins.can_leave or batch.options.durable is not False:
        return batch
    return batch._replace(options=replace(batch.options, durable=None))


def _refuse(batch: Batch, alias: str | None, when: When, *, can_leave: bool) -> None:
    if alias is not None:
        options = "enqueue_on_commit=False and durable=False" if when else "durable=False"
        remedy = f", or pass {options}, which enqueues outside the transaction" if can_leave else ""
        raise WaitInTransactionError(
            f"cannot wait for a job of queue {batch.queue!r} inside a transaction of database {alias!r}: "
            "the job starts only after the transaction commits. Wait after the commit (in "
            f"transaction.on_commit){remedy}"
        )


def refuse_uncommitted(queue: str, job_id: str, alias: str | None, *, can_leave: bool = True) -> None:
    """Raise WaitInTransactionError for a job that the caller enqueued in a transaction that is still open."""
    if alias is not None:
        remedy = ", or enqueue with durable=False, which enqueues outside the transaction"
        raise WaitInTransactionError(
            f"Job {job_id!r} of queue {queue!r} was enqueued in a transaction of database {alias!r} that "
            "is still open, so workers cannot see the job yet: wait after the commit (in "
            f"transaction.on_commit){remedy if can_leave else ''}"
        )
