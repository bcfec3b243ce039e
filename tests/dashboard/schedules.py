"""What tests of schedules fill in, and a middleware that refuses their jobs."""

from typing import Any

GOOD = {
    "name": "night report",
    "job_name": "shop.jobs.report",
    "queue": "",
    "enabled": "on",
    "schedule": "30 2 * * *",
    "timezone": "Europe/Berlin",
    "every": "",
    "jitter": "",
    "overlap": "allow",
    "missed": "one",
    "missed_window": "1 00:00:00",
    "blackouts": "",
    "on_blackout": "skip",
    "max_executions": "",
    "args": "[1]",
    "kwargs": '{"to": "ann"}',
}


class Refuses:
    """A middleware that lets nothing pass."""

    def enqueue(self, batch: Any, call_next: Any) -> Any:
        raise PermissionError("not now")

    async def aenqueue(self, batch: Any, call_next: Any) -> Any:
        raise PermissionError("not now")
