"""The table of operations, from which the socket and the delegation of the database storage are built."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.queue import QueuePolicy
from djqueue.storage.base import Storage
from djqueue.storage.facets import Events, Jobs, Limiters, Queues, Workers
from djqueue.storage.journaled.operations import OPERATIONS, AnsweredBy, operation_of
from djqueue.storage.journaled.scheduler import SchedulerStorage
from djqueue.storage.journaled.tables import TableAnswers
from djqueue.storage.reads import Reads

FACETS = (Jobs, Queues, Limiters, Workers, Reads, Events)
WITHOUT_REQUEST = {
    "Events.subscribe": "a subscription of the connection",
    "Workers.on_command": "a subscription of the connection",
    "Reads.findings": "looks at this process only",
}
"""Operations that are not one request to the scheduler, with the reason."""
HOT_PATH = {
    "enqueue_each",
    "subscribe_new",
    "acall",
    "claim",
    "close",
    "connect",
    "describe",
    "emit",
    "enqueue",
    "finish",
    "listen",
}
HOT_PATH |= {"renew", "report", "sweep", "maintain", "resign", "notify_incidents"}


def methods(facet: type) -> Iterator[Callable[..., Any]]:
    """Yield the sync operations of a facet."""
    for name, value in vars(facet).items():
        is_twin = name.startswith("a") and name[1:] in vars(facet)
        if inspect.isfunction(value) and not name.startswith("_") and not is_twin:
            yield value


CONTRACT = [method for facet in FACETS for method in methods(facet)]


@pytest.mark.parametrize("method", CONTRACT, ids=lambda method: method.__qualname__)
def test_operation_of_facet_is_in_table_or_needs_no_request(method) -> None:
    name = method.__qualname__

    if name in WITHOUT_REQUEST:
        with pytest.raises(KeyError):
            operation_of(method)
    else:
        operation = operation_of(method)
        assert operation.name == f"{name.partition('.')[0].lower()}.{method.__name__}"
        assert isinstance(operation.answered_by, AnsweredBy)
        assert operation.deadline > 0


def test_names_on_socket_are_unique_and_scheduler_has_them() -> None:
    names = [operation_of(method).name for method in CONTRACT if method.__qualname__ not in WITHOUT_REQUEST]

    assert len(names) == len(set(names))
    assert set(names) < OPERATIONS.keys()
    assert all(hasattr(SchedulerStorage, one.served_by) for one in OPERATIONS.values() if one.served_by)


BY_TABLES = [
    method
    for method in CONTRACT
    if method.__qualname__ not in WITHOUT_REQUEST
    and operation_of(method).answered_by
    in (AnsweredBy.TABLES, AnsweredBy.SCHEDULER_OR_TABLES, AnsweredBy.CONNECTED_OR_TABLES)
]


@pytest.mark.parametrize("method", BY_TABLES, ids=lambda method: method.__qualname__)
def test_tables_answer_every_operation_assigned_to_tables(method) -> None:
    tables = TableAnswers("default", SYSTEM_CLOCK, lambda _queue: QueuePolicy(), None)

    answers = operation_of(method).of(tables)

    wanted = list(inspect.signature(method).parameters.values())[1:]
    given = list(inspect.signature(answers).parameters.values())
    assert [one.kind for one in given] == [one.kind for one in wanted]
    assert [one.default for one in given] == [one.default for one in wanted]


def test_storage_itself_has_hot_path_only() -> None:
    public = {name for name, value in vars(Storage).items() if inspect.isfunction(value) and name[0] != "_"}

    assert {name for name in public if not (name[0] == "a" and name[1:] in public)} == HOT_PATH
