"""Throttling of frequent log lines."""

import logging

import pytest

from djqueue.core.messages import ThrottledLog


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
