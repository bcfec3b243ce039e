"""Alerts: one message when a problem begins, and one when it is over, from one process of all that run jobs.

Problems are those of `problems`. The activity has a row for each message, from which another process knows
which problems have been announced.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from logging import ERROR
from threading import Lock
from typing import NamedTuple
from urllib.request import Request, urlopen

from django.core.mail import send_mail

from djqueue import signals
from djqueue.client.announcing import clean_thread, close_thread
from djqueue.conf import AlertSettings, get_settings
from djqueue.core.callqueue import CallQueue
from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.logs import Log, type_name
from djqueue.core.messages import ThrottledLog, in_one_line, without_credentials
from djqueue.core.overview import Evidence, Finding
from djqueue.core.units import to_datetime
from djqueue.models import AuditEvent
from djqueue.storage.base import Storage
from djqueue.storage.tables.leaderlease import LeaderLease

from .healthchecks import listed, monitor
from .problems import problems, read_situation
from .sweeps import alias_of

logger = Log("djqueue.alerts")
throttled = ThrottledLog(logger, 60.0)

RULES = {
    "new_error": ("problem.new_errors",),
    "late": ("problem.late",),
    "no_worker": ("health.workers", "health.handlers"),
    "missed_schedule": ("problem.overdue",),
    "lost_worker": ("health.silent", "problem.lost"),
}
"""Ids of findings by the rule that announces them."""
TITLES = {
    "problem.new_errors": "New error since the deploy",
    "problem.late": "Jobs start later than their OBJECTIVE",
    "health.workers": "No worker",
    "health.handlers": "No worker knows the job",
    "problem.overdue": "Schedule is overdue",
    "health.silent": "Worker sends no heartbeats",
    "problem.lost": "Attempts lost with their worker",
}
LOOK_EVERY = 15_000
"""Milliseconds between two looks at the problems."""
FOLLOW_EVERY = 5_000
"""Milliseconds between two attempts to take over from the process that looks at them."""
OVER_AFTER = 60_000
"""Milliseconds for which a problem must be gone before it is over."""
MAX_ROWS = 1_000
"""Newest rows of the activity from which announced problems are known."""
TIMEOUT = 10.0
"""Seconds that the webhook may take."""
MAX_WAITING = 1_000
"""Messages that wait to be sent; further ones are sent after a later look."""
BEGAN, OVER = "problem", "problem_over"
"""Actions in the activity."""

ProblemKey = tuple[str, ...]
"""The identity of a problem: the id of its finding, and the object that has it."""


class ProblemMessage(NamedTuple):
    """A message about problems of one kind that began, or that are over."""

    id: str
    """Id of the finding."""
    is_over: bool
    hint: str
    objects: tuple[Evidence, ...]

    @property
    def keys(self) -> list[ProblemKey]:
        return [key_of(self.id, one) for one in self.objects]

    @property
    def text(self) -> str:
        """The message in one line."""
        names = listed([_name_of(one) for one in self.objects])
        return f"{'Over' if self.is_over else 'Began'}: {TITLES[self.id]}: {names}"


class Alerts:
    """Announces the problems of a storage, in the one process that holds the lease on this work."""

    def __init__(self, storage: Storage, clock: Clock = SYSTEM_CLOCK) -> None:
        self._alias = alias_of(storage, AuditEvent)
        self._clock = clock
        self._lease = LeaderLease(self._alias, clock, "alerts")
        self._next_look = self._next_try = clock.monotonic()
        self._lock = Lock()
        self._open: dict[ProblemKey, Evidence] = {}
        """Announced problems."""
        self._sending: set[ProblemKey] = set()
        self._since: dict[ProblemKey, int] = {}
        """Monotonic time since which a problem is there; of an announced one, since which it is gone."""
        self._calls = CallQueue("djqueue-alerts", MAX_WAITING, on_error=_log_failure, on_drop=lambda _: None)
        self._calls.before, self._calls.idle = clean_thread, close_thread

    def look(self) -> None:
        """Announce what has begun and what is over, if it is time to; nothing without rules or receivers."""
        now, wanted = self._clock.monotonic(), _settings()
        if wanted is None or not self._leads(now) or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY
        found = {
            key_of(finding.id, one): (finding, one)
            for finding in _findings(wanted.rules)
            for one in finding.evidence
        }
        with self._lock:
            known, sending = dict(self._open), set(self._sending)
        changed = {key for key in {*found, *known} if (key in found) != (key in known)} - sending
        self._since = {key: self._since.get(key, now) for key in changed}
        due = {
            key
            for key, at in self._since.items()
            if now - at >= (OVER_AFTER if key in known else wanted.after)
        }
        messages = [
            ProblemMessage(finding.id, False, finding.hint, tuple(objects))
            for finding, objects in _by_finding(found[key] for key in found if key in due)
        ]
        over: dict[str, list[Evidence]] = {}
        for key in known:
            if key in due:
                over.setdefault(key[0], []).append(known[key])
        messages += [ProblemMessage(id, True, "", tuple(objects)) for id, objects in over.items()]
        for message in messages:
            with self._lock:
                self._sending.update(message.keys)
            self._calls.put(partial(self._send, message, wanted))

    def _leads(self, now: int) -> bool:
        if not self._lease.number:
            if now < self._next_try:
                return False
            self._next_try = now + FOLLOW_EVERY
            if not self._lease.acquire():
                return False
            self._since = {}
            with self._lock:
                self._open = announced(self._alias)
            return True
        return self._lease.acquire()

    def _send(self, message: ProblemMessage, wanted: AlertSettings) -> None:
        """Send a message, and record it; if it cannot be sent, a later look tries again."""
        try:
            signals.problem.send_robust(
                sender=None,
                id=message.id,
                text=message.text,
                hint=message.hint,
                is_over=message.is_over,
                objects=message.objects,
            )
            notify(message, wanted)
            for key, one in zip(message.keys, message.objects, strict=True):
                AuditEvent.objects.using(self._alias).create(
                    at=to_datetime(self._clock.now()),
                    user="-",
                    action=OVER if message.is_over else BEGAN,
                    queue=one.queue,
                    job_id=one.job,
                    detail={"problem": TITLES[message.id], "object": _name_of(one), "key": list(key)},
                )
            with self._lock:
                for key, one in zip(message.keys, message.objects, strict=True):
                    if message.is_over:
                        self._open.pop(key, None)
                    else:
                        self._open[key] = one
        finally:
            with self._lock:
                self._sending.difference_update(message.keys)


def alerting(storage: Storage) -> Callable[[], None]:
    """Return a function that announces a storage's problems; it does nothing without the tables."""
    alerts: Alerts | None = None

    def look() -> None:
        nonlocal alerts
        if _settings() is None:
            return
        if alerts is None:
            alerts = Alerts(storage)
        alerts.look()

    return look


def notify(message: ProblemMessage, wanted: AlertSettings) -> None:
    """Send a message by mail and to the webhook, as the settings say. Raises what sending raises."""
    if wanted.mail:
        lines = [f"- {_name_of(one)}{_since_of(one)}" for one in message.objects]
        body = "\n".join([message.text, "", *lines, "", message.hint]).rstrip() + "\n"
        send_mail(f"[djqueue] {message.text[:150]}", body, None, list(wanted.mail))
    if wanted.webhook:
        document = {
            "text": message.text,
            "problem": message.id,
            "status": "over" if message.is_over else "began",
            "hint": message.hint,
            "objects": [one._asdict() for one in message.objects],
        }
        request = Request(  # noqa: S310 - the settings allow http and https alone
            wanted.webhook, json.dumps(document).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urlopen(request, timeout=TIMEOUT):  # noqa: S310 - the settings allow http and https alone
            pass


def announced(alias: str) -> dict[ProblemKey, Evidence]:
    """Return the problems that were announced and are not over."""
    rows = AuditEvent.objects.using(alias).filter(action__in=(BEGAN, OVER), refused=False)
    newest = rows.order_by("-pk").values_list("action", "detail")[:MAX_ROWS]
    found: dict[ProblemKey, Evidence] = {}
    for action, detail in reversed(newest):
        key = tuple(detail.get("key", ()))
        if action == OVER:
            found.pop(key, None)
        elif len(key) == len(KEY) + 1 and key[0] in TITLES:
            schedule = int(key[4]) if key[4] else None
            values = dict(zip(KEY, key[1:], strict=True)) | {"schedule": schedule}
            found[key] = Evidence(**values)
    return found


KEY = ("queue", "name", "worker", "schedule", "error")
"""Fields of an object that are part of its problem's key."""


def key_of(id: str, one: Evidence) -> ProblemKey:
    """Return the identity of an object's problem."""
    error = one.error.partition(",")[0]
    return (id, one.queue, one.name, one.worker, str(one.schedule or ""), error)


def _settings() -> AlertSettings | None:
    wanted = get_settings().alerts
    return wanted if wanted.mail or wanted.webhook or signals.problem.receivers else None


def _findings(rules: Sequence[str]) -> list[Finding]:
    ids = {id for rule in rules for id in RULES[rule]}
    report = monitor.report(get_settings().health)
    found = report.findings
    if report.facts is not None:
        found = problems(read_situation(report.facts), found)
    return [one for one in found if one.id in ids]


def _by_finding(
    found: Iterable[tuple[Finding, Evidence]],
) -> list[tuple[Finding, list[Evidence]]]:
    groups: dict[str, tuple[Finding, list[Evidence]]] = {}
    for finding, one in found:
        groups.setdefault(finding.id, (finding, []))[1].append(one)
    return list(groups.values())


def _name_of(one: Evidence) -> str:
    """Return an object as text."""
    named = one.text if one.error else one.name or one.worker
    return " in ".join(repr(part) for part in (named, one.queue) if part)


def _since_of(one: Evidence) -> str:
    return "" if one.since is None else f", since {to_datetime(one.since):%Y-%m-%d %H:%M:%S} UTC"


def _log_failure(error: BaseException) -> None:
    text = "An alert could not be sent, and is tried again: %s. Check ALERTS and the settings of mail."
    throttled.log(ERROR, type_name(error), text, without_credentials(in_one_line(error)).rstrip("."))
