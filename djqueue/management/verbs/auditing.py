"""Record what the command line changes in the activity log of the dashboard."""

import getpass
import logging
from typing import Any

from django.db import Error

from djqueue.core.messages import in_one_line
from djqueue.dashboard import audit

logger = logging.getLogger("djqueue.audit")


def note(action: str, *, queue: str = "", job_id: str = "", count: int = 0, **detail: Any) -> None:
    """Record an action of the operating system's user. See `djqueue.dashboard.audit.record`."""
    try:
        audit.record(
            user=f"{_login()} (command line)",
            action=action,
            queue=queue,
            job_id=job_id,
            count=count,
            detail=detail.pop("detail", {}) | detail,
        )
    except Error as error:
        # A project without database storage need not have the tables; the action itself has succeeded.
        logger.warning("The activity log could not be written: %s", in_one_line(error))


def _login() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown user"
