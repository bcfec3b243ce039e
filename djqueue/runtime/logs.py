"""Log records of `djqueue` that somebody sees, whatever the project's logging is set to."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

LEVELS = {0: logging.ERROR, 1: logging.INFO}
"""By Django's --verbosity; from 2 on, DEBUG: a line for the start and the end of each job."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def visible_logs(verbosity: int) -> Iterator[None]:
    """Set the level of the logger `djqueue`, and give it a handler on stderr if it has none.

    A level that the project has set stays as it is, unless a verbosity is asked for.
    """
    logger = logging.getLogger("djqueue")
    before = logger.level
    if before == logging.NOTSET or verbosity != 1:
        logger.setLevel(LEVELS.get(verbosity, logging.DEBUG))
    handler = None
    if not has_enabled_handler(logger):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(before)
        if handler is not None:
            logger.removeHandler(handler)
            handler.close()


def has_enabled_handler(logger: logging.Logger) -> bool:
    """Whether a handler would let a warning of this logger through.

    `hasHandlers` is no answer: Django's own console handler lets nothing through unless DEBUG is on.
    """
    record = logger.makeRecord(logger.name, logging.WARNING, "", 0, "", (), None)
    at: logging.Logger | None = logger
    while at is not None:
        for handler in at.handlers:
            if handler.level <= record.levelno and handler.filter(record):
                return True
        at = at.parent if at.propagate else None
    return False
