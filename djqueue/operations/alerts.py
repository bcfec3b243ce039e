"""Alerts: one message when a problem begins, and one when it is over, from one process of all that run jobs.

Problems are those of `problems`. The activity has a row for each message, from which another process knows
which problems have been announced.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from logging import ERROR
from threading import Lock
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from django.core import mail

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
from .sweeps import alias_of, with_tables

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
AGAIN_AFTER = 60_000
"""Milliseconds until a message that could not be sent is tried again, if ALERTS has no AFTER."""
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
        if self.is_over and self.id == "problem.new_errors":
            # Jobs may go on failing with it: another deploy was the last one since.
            return f"No longer new since the deploy: {names}"
        return f"{'Over' if self.is_over else 'Began'}: {TITLES[self.id]}: {names}"


Channel = Callable[[ProblemMessage, AlertSettings], None]


class Announcement:
    """The messages about a problem that channels and the activity have."""

    def __init__(self) -> None:
        self.evidence = Evidence()
        self.channels: set[Channel] = set()
        """Channels on which it has begun and is not over."""
        self.is_recorded = False
        """Whether the activity says the same."""
        self.next_at = 0
        """Monotonic time before which a message that could not be sent on each channel is not repeated."""

    @classmethod
    def of(cls, evidence: Evidence) -> "Announcement":
        """Return what is known of a problem that was announced completely."""
        announcement = cls()
        announcement.evidence, announcement.channels, announcement.is_recorded = evidence, {*CHANNELS}, True
        return announcement

    def is_behind(self, *, is_there: bool) -> bool:
        """Return whether a channel or the activity lacks that the problem began, or that it is over."""
        done = sum(channel in self.channels for channel in CHANNELS) + self.is_recorded
        return done != (len(CHANNELS) + 1 if is_there else 0)


class Alerts:
    """Announces the problems of a storage, in the one process that holds the lease on this work."""

    def __init__(self, storage: Storage, clock: Clock = SYSTEM_CLOCK) -> None:
        self._alias = alias_of(storage, AuditEvent)
        self._clock = clock
        self._lease = LeaderLease(self._alias, clock, "alerts")
        self._next_look = self._next_try = clock.monotonic()
        self._lock = Lock()
        self._known: dict[ProblemKey, Announcement] = {}
        """Problems that a message was about, until they are over on each channel."""
        self._sending: set[ProblemKey] = set()
        self._since: dict[tuple[ProblemKey, bool], int] = {}
        """Monotonic time since which a problem is there, or is gone, and a message about that is missing."""
        self._calls = CallQueue("djqueue-alerts", MAX_WAITING, on_error=_log_failure, on_drop=lambda _: None)
        self._calls.before, self._calls.idle = clean_thread, close_thread

    def look(self) -> None:
        """Announce what has begun and what is over, if it is time to; nothing without rules or receivers."""
        now, wanted = self._clock.monotonic(), _settings()
        if wanted is None or not self._leads(now) or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY
        self._calls.resume()
        findings = _findings(wanted.rules)
        if findings is None:
            # Problems that cannot be seen are neither over nor do they begin.
            self._since = {}
            return
        found = {key_of(finding.id, one): (finding, one) for finding in findings for one in finding.evidence}
        with self._lock:
            known, sending = dict(self._known), set(self._sending)
            behind = found.keys() - known.keys() - sending
            for key in known.keys() - sending:
                if known[key].is_behind(is_there=key in found):
                    behind.add(key)
                elif key not in found:
                    del self._known[key]
        changes = [(key, key in found) for key in behind]
        self._since = {change: self._since.get(change, now) for change in changes}
        due = {
            key
            for (key, is_there), at in self._since.items()
            if now - at >= (wanted.after if is_there else OVER_AFTER)
            and (key not in known or now >= known[key].next_at)
        }
        messages = [
            ProblemMessage(finding.id, False, finding.hint, tuple(objects))
            for finding, objects in _by_finding(found[key] for key in found if key in due)
        ]
        over: dict[str, list[Evidence]] = {}
        for key in known:
            if key in due and key not in found:
                over.setdefault(key[0], []).append(known[key].evidence)
        messages += [ProblemMessage(id, True, "", tuple(objects)) for id, objects in over.items()]
        for message in messages:
            with self._lock:
                self._sending.update(message.keys)
            if not self._calls.put(partial(self._send, message, wanted)):
                with self._lock:
                    self._sending.difference_update(message.keys)

    def _leads(self, now: int) -> bool:
        if not self._lease.number:
            if now < self._next_try:
                return False
            self._next_try = now + FOLLOW_EVERY
            if not self._lease.acquire():
                return False
            self._since, known = {}, None
            try:
                known = announced(self._alias)
            finally:
                if known is None:
                    self._leave()
            with self._lock:
                self._known = {key: Announcement.of(one) for key, one in known.items()}
            return True
        return self._lease.acquire()

    def _leave(self) -> None:
        try:
            self._lease.release()
        finally:
            self._lease.number = 0

    def _send(self, message: ProblemMessage, wanted: AlertSettings) -> None:
        """Send a message, and record it; after a time, another look repeats the parts that failed."""
        with self._lock:
            about = [self._known.setdefault(key, Announcement()) for key in message.keys]
        for announcement, evidence in zip(about, message.objects, strict=True):
            announcement.evidence = evidence
        next_at = self._clock.monotonic() + (wanted.after or AGAIN_AFTER)
        try:
            sent = [self._send_by(channel, message, wanted, about) for channel in CHANNELS]
            if all(sent):
                self._record(message, about)
                next_at = 0
        finally:
            with self._lock:
                self._sending.difference_update(message.keys)
                # Meanwhile, this process may have lost its lease and taken over again.
                self._known.update(zip(message.keys, about, strict=True))
                for announcement in about:
                    announcement.next_at = next_at

    def _send_by(
        self, channel: Channel, message: ProblemMessage, wanted: AlertSettings, about: Sequence[Announcement]
    ) -> bool:
        """Send a message on a channel about the objects that it lacks; return whether it lacks none."""
        left = [one for one in about if (channel in one.channels) == message.is_over]
        if not left:
            return True
        try:
            channel(message._replace(objects=tuple(one.evidence for one in left)), wanted)
        except Exception as error:
            _log_failure(error)
            return False
        for one in left:
            one.channels ^= {channel}
        return True

    def _record(self, message: ProblemMessage, about: Sequence[Announcement]) -> None:
        left = [one for one in about if one.is_recorded == message.is_over]
        rows = [
            AuditEvent(
                at=to_datetime(self._clock.now()),
                user="-",
                action=OVER if message.is_over else BEGAN,
                queue=one.queue,
                job_id=one.job,
                detail={"key": list(key_of(message.id, one)), "worker": one.worker, "text": one.text},
            )
            for one in (announcement.evidence for announcement in left)
        ]
        AuditEvent.objects.using(self._alias).bulk_create(rows)
        for announcement in left:
            announcement.is_recorded = not message.is_over


def alerting(storage: Storage) -> Callable[[], None]:
    """Return a function that announces a storage's problems; it does nothing without the tables."""
    alerts: Alerts | None = None

    def look() -> None:
        nonlocal alerts
        if alerts is None:
            alerts = Alerts(storage)
        alerts.look()

    return with_tables(look, _settings, alias_of(storage, AuditEvent), logger, "look at the problems")


class WebhookError(Exception):
    """The webhook could not be called. The text has no part of its URL, which may be a secret."""


class NoRedirects(HTTPRedirectHandler):
    """Refuses redirects: one would be followed without the document, and to any address."""

    def redirect_request(self, *_: Any) -> None:
        """Follow none."""


opener = build_opener(NoRedirects)


def send_signal(message: ProblemMessage, _wanted: AlertSettings) -> None:
    """Send a message to the receivers of the signal `problem`."""
    signals.problem.send_robust(
        sender=None,
        id=message.id,
        text=message.text,
        hint=message.hint,
        is_over=message.is_over,
        objects=message.objects,
    )


def send_mail(message: ProblemMessage, wanted: AlertSettings) -> None:
    """Send a message by mail, if the settings have addresses."""
    if wanted.mail:
        lines = [f"- {_name_of(one)}{_since_of(one)}" for one in message.objects]
        body = "\n".join([message.text, "", *lines, "", message.hint]).rstrip() + "\n"
        # Django 6.1 replaces the one by the other.
        mailers: Any = getattr(mail, "mailers", None)
        connection: Any = mail.get_connection() if mailers is None else mailers.default
        if getattr(connection, "timeout", TIMEOUT) is None:
            connection.timeout = int(TIMEOUT)
        subject = f"[djqueue] {message.text[:150]}"
        connection.send_messages([mail.EmailMessage(subject, body, None, list(wanted.mail))])


def call_webhook(message: ProblemMessage, wanted: AlertSettings) -> None:
    """Send a message to the webhook, if the settings have one. Raises WebhookError."""
    if wanted.webhook:
        document = {
            "text": message.text,
            "problem": message.id,
            "status": "over" if message.is_over else "began",
            "hint": message.hint,
            "objects": [one._asdict() for one in message.objects],
        }
        data, headers = json.dumps(document).encode(), {"Content-Type": "application/json"}
        try:
            # The settings allow http and https alone.
            request = Request(wanted.webhook, data, headers, method="POST")  # noqa: S310
            opener.open(request, timeout=TIMEOUT).close()
        except HTTPError as error:
            error.close()
            raise WebhookError(f"the webhook answered with status {error.code}") from None
        except URLError as error:
            raise WebhookError(f"the webhook cannot be reached: {error.reason}") from None
        except Exception as error:
            raise WebhookError(f"the webhook cannot be called: {type(error).__name__}") from None


CHANNELS: tuple[Channel, ...] = (send_signal, send_mail, call_webhook)


def announced(alias: str) -> dict[ProblemKey, Evidence]:
    """Return the problems that were announced and are not over."""
    rows = AuditEvent.objects.using(alias).filter(action__in=(BEGAN, OVER), refused=False)
    newest = rows.order_by("-pk").values_list("action", "detail")[:MAX_ROWS]
    found: dict[ProblemKey, Evidence] = {}
    for action, detail in reversed(newest):
        key = tuple(detail.get("key", ()))
        if action == OVER:
            found.pop(key, None)
        elif (one := object_of(detail)) is not None:
            found[key] = one
    return found


def object_of(detail: Mapping[str, Any]) -> Evidence | None:
    """Return the object of a problem from its row of the activity; None if the row is of another version."""
    key = tuple(detail.get("key", ()))
    if len(key) != len(KEY) + 1 or key[0] not in TITLES:
        return None
    values = dict(zip(KEY, key[1:], strict=True))
    schedule = int(key[4]) if key[4] else None
    return Evidence(**values | {"schedule": schedule, "text": detail.get("text", "")})


KEY = ("queue", "name", "worker", "schedule", "error")
"""Fields of an object that are part of its problem's key."""


def key_of(id: str, one: Evidence) -> ProblemKey:
    """Return the identity of an object's problem."""
    error = one.error.partition(",")[0]
    return (id, one.queue, one.name, one.worker, str(one.schedule or ""), error)


def _settings() -> AlertSettings | None:
    wanted = get_settings().alerts
    return wanted if wanted.mail or wanted.webhook or signals.problem.receivers else None


def _findings(rules: Sequence[str]) -> list[Finding] | None:
    """Return the problems of chosen kinds; None if the storage cannot be read."""
    ids = {id for rule in rules for id in RULES[rule]}
    report = monitor.report(get_settings().health)
    if report.facts is None:
        return None
    found = problems(read_situation(report.facts), report.findings)
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
