"""Errors of an unavailable storage have exactly one punctuation mark before their hint."""

from traceback import format_exception
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from django.db import Error, IntegrityError, OperationalError

from djqueue.storage.redis.retries import no_answer
from djqueue.storage.tables.dberrors import named, unavailable

REASONS = {
    "Connection refused": "Connection refused. Is it running?",
    "Connection refused.": "Connection refused. Is it running?",
}


@pytest.mark.parametrize("reason", REASONS)
def test_redis_error_has_one_period_before_its_hint(reason: str) -> None:
    server: Any = SimpleNamespace(describe=lambda: "redis localhost:6379/0")

    assert str(no_answer(redis.ConnectionError(reason), server)).endswith(f"answer: {REASONS[reason]}")


@pytest.mark.parametrize("reason", [*REASONS, "accepting connections?"])
def test_database_error_has_one_punctuation_mark_before_its_hint(reason: str) -> None:
    expected = REASONS.get(reason, "accepting connections? Is it running?")

    assert str(unavailable("default", OperationalError(reason))).endswith(f"used: {expected}")


def test_deadlock_is_not_reported_as_an_unavailable_database() -> None:
    error = OperationalError("deadlock detected\nDETAIL:  Process 1 waits for ShareLock on transaction 2")

    for alias in ("default", "postgresql://localhost/shop"):
        message = str(unavailable(alias, error))
        assert message.endswith("Two transactions waited for each other, and this one was undone: try again.")


def test_error_of_too_many_locks_says_what_they_are() -> None:
    error = OperationalError(
        "out of shared memory\nHINT:  You might need to increase max_locks_per_transaction."
    )

    assert "holds a lock for each unique and concurrency key of its jobs" in str(
        unavailable("default", error)
    )


@pytest.mark.parametrize("kind", [IntegrityError, OperationalError])
def test_row_that_postgresql_adds_to_its_message_is_in_no_text_of_the_error(kind: type[Error]) -> None:
    class DriverError(Exception):
        diag = SimpleNamespace(message_primary="it is refused", message_hint="Look.", sqlstate="23514")

    text = "it is refused\nDETAIL:  Failing row contains (secret)\nHINT: Look."
    with pytest.raises(Exception, match="it is refused Look") as caught, named("default"):
        raise kind(text) from DriverError(text)

    assert "secret" not in "".join(format_exception(caught.value))
