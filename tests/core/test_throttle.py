"""Throttling of frequent log lines, and rows in errors of databases."""

import logging
from types import SimpleNamespace

import pytest

from djqueue.core.messages import ThrottledLog, hide_row


def test_each_kind_is_logged_once_per_interval_with_a_suppressed_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 100.0
    log = ThrottledLog(logging.getLogger("djqueue.test"), 60.0, clock=lambda: now)

    for _ in range(1_000):
        log.log(logging.WARNING, "a", "Refused %s.", "it")
    assert log.log(logging.WARNING, "b", "Closed.")
    now += 60
    assert log.log(logging.WARNING, "a", "Refused %s.", "it")
    now += 59
    assert not log.log(logging.WARNING, "a", "Refused %s.", "it")

    assert caplog.messages == [
        "Refused it.",
        "Closed.",
        "Refused it. (999 similar events since the last line)",
    ]


@pytest.mark.parametrize("sqlstate", ["23514", None])
def test_rows_are_removed_from_errors_of_the_database_but_no_other_message(sqlstate: str | None) -> None:
    def driver_error() -> Exception:
        error = Exception("refused\nDETAIL: secret")
        error.diag = SimpleNamespace(sqlstate=sqlstate, message_primary="refused", message_hint=None)  # type: ignore[attr-defined]
        return error

    same, other = Exception("refused\nDETAIL: secret"), Exception("the import failed", 5)
    same.__cause__, other.__cause__ = driver_error(), driver_error()
    for error in (same, other):
        hide_row(error)
        hide_row(error)

    assert same.args == ("refused",)
    assert other.args == ("the import failed", 5)
    assert {str(error.__cause__) for error in (same, other)} == {"refused"}
