"""Loggers of djqueue, whose handlers belong to the project."""

import logging
import threading

import pytest

from djqueue.core import logs
from djqueue.core.logs import MAX_TRACEBACK, Log
from tests.support import PATIENCE, eventually

NAME = "djqueue.logs_of_tests"


class Keeping(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []
        self.threads = set()

    def emit(self, record):
        self.lines.append(self.format(record))
        self.threads.add(threading.current_thread().name)


class Raising(logging.Handler):
    def emit(self, record):
        raise RuntimeError("no table")


class Waiting(Keeping):
    def __init__(self):
        super().__init__()
        self.go_on = threading.Event()

    def emit(self, record):
        self.go_on.wait(PATIENCE)
        super().emit(record)


@pytest.fixture
def log(monkeypatch):
    """A logger, and a function that adds handlers to it."""
    logger = logging.getLogger(NAME)
    logger.setLevel(logging.INFO)
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(logs._complaints, "_kinds", {})
    return Log(NAME)


def add(handler):
    logging.getLogger(NAME).addHandler(handler)
    return handler


def apart():
    return logs.handled_apart(lambda: None, lambda: None)


def test_record_is_that_of_the_logger_with_this_name(log, caplog):
    caplog.set_level(logging.INFO)
    logging.getLogger(NAME).propagate = True

    log.info("A %s of %d", "record", 1, extra={"job_id": "7"})

    record = caplog.records[-1]
    assert (record.name, record.getMessage(), record.levelno) == (NAME, "A record of 1", logging.INFO)
    assert (record.funcName, record.filename, record.job_id) == (
        "test_record_is_that_of_the_logger_with_this_name",
        "test_logs.py",
        "7",
    )


def test_handler_that_raises_affects_neither_the_caller_nor_other_handlers(log, capsys):
    add(Raising())
    keeping = add(Keeping())

    for number in range(3):
        log.error("record %d", number)

    assert keeping.lines == ["record 0", "record 1", "record 2"]
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        f"The log handler {__name__}.Raising raised builtins.RuntimeError: no table. "
        "It has missed a record of djqueue."
    )


def test_filter_that_raises_affects_neither_the_caller_nor_the_handlers(log, capsys):
    def refuse(record):
        raise RuntimeError("no request")

    logging.getLogger(NAME).addFilter(refuse)
    keeping = add(Keeping())

    log.warning("record")

    assert keeping.lines == ["record"]
    assert "raised builtins.RuntimeError: no request" in capsys.readouterr().err


def test_levels_and_filters_of_the_project_apply(log):
    logging.getLogger(NAME).addFilter(lambda record: "secret" not in record.getMessage())
    keeping = add(Keeping())
    keeping.setLevel(logging.ERROR)

    log.error("a secret")
    log.warning("too low")
    log.debug("too low for the logger")
    log.error("shown")

    assert keeping.lines == ["shown"]


def test_traceback_of_a_record_has_a_limited_length_whatever_the_exception_does(log):
    keeping = add(Keeping())
    hostile = type("Hostile", (BaseException,), {"__str__": lambda self: 1 // 0, "__notes__": property(exit)})

    log.error("huge", exc_info=ValueError("x" * 10_000_000))
    log.error("hostile", exc_info=hostile())

    huge, broken = keeping.lines
    assert MAX_TRACEBACK / 2 < len(huge) <= MAX_TRACEBACK + len("huge\n")
    assert broken == "hostile\n(the traceback cannot be shown: builtins.SystemExit)"


def test_handlers_of_a_worker_run_on_a_thread_of_their_own_in_order(log):
    keeping = add(Keeping())

    with apart():
        for number in range(100):
            log.info("record %d", number)
        assert logs.flush()

    assert keeping.lines == [f"record {number}" for number in range(100)]
    assert keeping.threads == {"djqueue-logs"}


def test_records_are_handled_at_once_after_the_worker(log):
    keeping = add(Keeping())

    with apart():
        pass
    log.info("record")

    assert keeping.threads == {threading.current_thread().name}


def test_records_that_a_slow_handler_cannot_take_are_dropped_and_counted(log, monkeypatch, caplog):
    monkeypatch.setattr(logs._queue, "_limit", 10)
    waiting = add(Waiting())

    with apart():
        log.info("first")
        eventually(lambda: not len(logs._queue))
        for number in range(15):
            log.info("record %d", number)
        waiting.go_on.set()
        assert logs.flush()

    assert waiting.lines == ["first", *(f"record {number}" for number in range(10))]
    assert "The log handlers are too slow: 5 records of djqueue were dropped." in caplog.messages
