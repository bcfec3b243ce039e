"""Log handlers that `runworkers` installs so that its records are visible."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from django.utils.log import RequireDebugTrue

from djqueue.runtime.console import FORMAT, UtcFormatter, has_enabled_handler, visible_logs

worker = logging.getLogger("djqueue.worker")


@contextmanager
def bare() -> Iterator[logging.Logger]:
    """The package's logger without a handler on the way up, where pytest has its own."""
    logger = logging.getLogger("djqueue")
    before = logger.propagate, logger.handlers
    logger.propagate, logger.handlers = False, []
    try:
        yield logger
    finally:
        logger.propagate, logger.handlers = before


def lines(capsys) -> list[str]:
    return [line.split(": ", 1)[1] for line in capsys.readouterr().err.splitlines()]


def test_temporary_log_handler_is_installed_if_logging_has_none(capsys):
    with bare() as logger:
        with visible_logs(1):
            worker.info("seen")
            worker.debug("not seen")
        worker.info("no longer seen")
        assert logger.handlers == []
        assert logger.level == logging.NOTSET

    assert lines(capsys) == ["seen"]


def test_verbosity_option_sets_the_log_level(capsys):
    with bare():
        with visible_logs(0):
            worker.info("too little")
            worker.error("broken")
        with visible_logs(2):
            worker.debug("details")

    assert lines(capsys) == ["broken", "details"]


def test_no_log_handler_is_installed_if_the_project_has_one(capsys):
    with bare() as logger:
        logger.addHandler(logging.NullHandler())
        with visible_logs(1):
            worker.info("to the project")

    assert lines(capsys) == []


def test_log_handler_is_installed_if_the_handlers_of_the_project_drop_everything(capsys, settings):
    """Django's own console handler, with DEBUG off."""
    settings.DEBUG = False
    muted = logging.StreamHandler()
    muted.addFilter(RequireDebugTrue())
    with bare() as logger:
        logger.addHandler(muted)
        assert not has_enabled_handler(logger)
        with visible_logs(1):
            worker.info("seen")

    assert lines(capsys) == ["seen"]


def test_log_level_of_the_project_is_kept(capsys):
    with bare() as logger:
        logger.setLevel(logging.WARNING)
        try:
            with visible_logs(1):
                worker.info("too little")
                worker.warning("enough")
            assert logger.level == logging.WARNING
        finally:
            logger.setLevel(logging.NOTSET)

    assert lines(capsys) == ["enough"]


def test_times_of_records_are_in_utc():
    record = logging.makeLogRecord(
        {"name": "djqueue.worker", "levelname": "INFO", "created": 0, "msecs": 250}
    )
    record.msg = "seen"

    assert UtcFormatter(FORMAT).format(record) == "1970-01-01 00:00:00.250+00:00 INFO djqueue.worker: seen"
