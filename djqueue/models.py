"""The tables: with the database storage the journal of the engine, else a mirror to look at.

Rows are written by the storage, by raw SQL over these tables' columns; times are UTC milliseconds in
the columns and aware datetimes in Python. A job is named by (queue, job_id).
"""

import json
from datetime import datetime, timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db import DEFAULT_DB_ALIAS, models
from django.db.models import F, Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from .conf import get_settings
from .core.clock import SYSTEM_CLOCK
from .core.durations import to_datetime, to_milliseconds
from .core.states import State
from .fields import MillisecondsField
from .schedules import Schedule

NAME = 255


class JobState(models.TextChoices):
    """The states of `djqueue.core.states`, with labels."""

    WAITING = State.WAITING.value, _("waiting")
    DELAYED = State.DELAYED.value, _("delayed")
    BLOCKED = State.BLOCKED.value, _("blocked")
    ACTIVE = State.ACTIVE.value, pgettext_lazy("job", "active")
    COMPLETED = State.COMPLETED.value, _("completed")
    FAILED = State.FAILED.value, _("failed")
    CANCELLED = State.CANCELLED.value, _("cancelled")


class Job(models.Model):
    """One job, as the engine last wrote it."""

    queue = models.CharField(_("queue"), max_length=NAME)
    job_id = models.CharField(_("job id"), max_length=NAME)
    name = models.CharField(_("job name"), max_length=NAME)
    state = models.CharField(_("state"), max_length=16, choices=JobState.choices)
    priority = models.IntegerField(_("priority"), default=0, help_text=_("Higher runs first."))
    payload = models.BinaryField(_("payload"))
    content_type = models.CharField(_("content type"), max_length=100)
    options = models.BinaryField(
        _("options"), help_text=_("Options that differ from their defaults, as MessagePack.")
    )
    unique_key = models.CharField(_("unique key"), max_length=NAME, null=True, blank=True)
    group = models.CharField(_("group"), max_length=NAME, null=True, blank=True)
    subject = models.CharField(_("subject"), max_length=NAME, null=True, blank=True)
    created_at = MillisecondsField(_("enqueued"))
    run_at = MillisecondsField(_("not before"))
    started_at = MillisecondsField(_("started"), null=True, blank=True)
    finished_at = MillisecondsField(_("finished"), null=True, blank=True)
    expires_at = MillisecondsField(
        _("kept until"), null=True, blank=True, help_text=_("When this row is removed.")
    )
    attempts = models.IntegerField(_("attempts"), default=0, help_text=_("Runs begun."))
    failures = models.IntegerField(_("failures"), default=0)
    stalls = models.IntegerField(_("stalls"), default=0, help_text=_("Runs lost with their worker."))
    worker = models.CharField(_("worker"), max_length=NAME, blank=True, default="")
    reason = models.CharField(_("reason"), max_length=NAME, blank=True, default="")
    error_type = models.CharField(_("error type"), max_length=NAME, blank=True, default="")
    error_message = models.TextField(_("error message"), blank=True, default="")
    traceback = models.TextField(_("traceback"), blank=True, default="")
    progress = models.BinaryField(_("progress"), null=True, blank=True)
    items = models.IntegerField(_("items"), default=0, help_text=_("That its last run has sent."))
    inbox = models.BooleanField(
        _("in the inbox"), default=False, help_text=_("Not yet taken in by the scheduler.")
    )
    token = models.BigIntegerField(
        _("fencing token"),
        default=0,
        db_default=0,  # Processes of the version before, which migrations meet, insert jobs without it.
        help_text=_("Of the present claim, or of the last one."),
    )
    process = models.CharField(
        _("process"),
        max_length=NAME,
        blank=True,
        default="",
        db_default="",
        help_text=_("Process that holds the claim."),
    )
    leased_until = MillisecondsField(
        _("leased until"), null=True, blank=True, help_text=_("When the claim ends unless renewed.")
    )

    class Meta:
        db_table = "djqueue_job"
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        permissions = (
            ("cancel_job", "Can cancel job"),
            ("promote_job", "Can promote job"),
            ("retry_job", "Can retry job"),
        )
        constraints = (models.UniqueConstraint(fields=["queue", "job_id"], name="djqueue_job_key"),)
        indexes = (
            models.Index(fields=["queue", "state", "finished_at"], name="djqueue_job_ended"),
            models.Index(fields=["queue", "state", "id"], name="djqueue_job_state_id"),
            models.Index(fields=["id"], name="djqueue_job_inbox", condition=Q(inbox=True)),
            models.Index(
                fields=["run_at"], name="djqueue_job_run_at", condition=Q(state=State.DELAYED.value)
            ),
            models.Index(
                fields=["queue", "unique_key"],
                name="djqueue_job_unique",
                condition=Q(unique_key__isnull=False),
            ),
            models.Index(
                fields=["subject", "created_at", "id"],
                name="djqueue_job_subject",
                condition=Q(subject__isnull=False),
            ),
            models.Index(
                fields=["expires_at"],
                name="djqueue_job_expires",
                condition=Q(expires_at__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return f"{self.name} {self.job_id}"


class JobResult(models.Model):
    """What a completed job returned."""

    queue = models.CharField(_("queue"), max_length=NAME)
    job_id = models.CharField(_("job id"), max_length=NAME)
    content_type = models.CharField(_("content type"), max_length=100)
    result = models.BinaryField(_("result"))
    completed_at = MillisecondsField(_("completed"))
    expires_at = MillisecondsField(_("kept until"), null=True, blank=True)

    class Meta:
        db_table = "djqueue_job_result"
        verbose_name = _("result")
        verbose_name_plural = _("results")
        constraints = (models.UniqueConstraint(fields=["queue", "job_id"], name="djqueue_result_key"),)
        indexes = (
            models.Index(
                fields=["expires_at"],
                name="djqueue_result_expires",
                condition=Q(expires_at__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return f"{self.queue} {self.job_id}"


class JobAttempt(models.Model):
    """A run that ended without completing its job."""

    queue = models.CharField(_("queue"), max_length=NAME)
    job_id = models.CharField(_("job id"), max_length=NAME)
    attempt = models.IntegerField(_("attempt"))
    worker = models.CharField(_("worker"), max_length=NAME)
    started_at = MillisecondsField(_("started"))
    finished_at = MillisecondsField(_("finished"))
    outcome = models.CharField(_("outcome"), max_length=16)
    error_type = models.CharField(_("error type"), max_length=NAME, blank=True, default="")
    error_message = models.TextField(_("error message"), blank=True, default="")
    traceback = models.TextField(_("traceback"), blank=True, default="")

    class Meta:
        db_table = "djqueue_job_attempt"
        verbose_name = _("attempt")
        verbose_name_plural = _("attempts")
        indexes = (models.Index(fields=["queue", "job_id"], name="djqueue_attempt_job"),)

    def __str__(self) -> str:
        return f"{self.job_id} #{self.attempt}"


class JobLog(models.Model):
    """A line that a handler logged for its job."""

    queue = models.CharField(_("queue"), max_length=NAME)
    job_id = models.CharField(_("job id"), max_length=NAME)
    at = MillisecondsField(_("at"))
    line = models.TextField(_("line"))

    class Meta:
        db_table = "djqueue_job_log"
        verbose_name = _("log line")
        verbose_name_plural = _("log lines")
        indexes = (models.Index(fields=["queue", "job_id"], name="djqueue_log_job"),)

    def __str__(self) -> str:
        return self.line


class JobItem(models.Model):
    """What a generator has yielded. Not of the mirror: with Redis there are none."""

    queue = models.CharField(_("queue"), max_length=NAME)
    job_id = models.CharField(_("job id"), max_length=NAME)
    number = models.IntegerField(_("number"))
    run = models.BigIntegerField(_("run"))
    item = models.BinaryField(_("item"))

    class Meta:
        db_table = "djqueue_job_item"
        verbose_name = _("item")
        verbose_name_plural = _("items")
        constraints = (
            models.UniqueConstraint(fields=["queue", "job_id", "number"], name="djqueue_item_key"),
        )

    def __str__(self) -> str:
        return f"{self.job_id} #{self.number}"


class DeadLetter(models.Model):
    """A job that failed for good; the rest of it is in its `Job` row."""

    queue = models.CharField(_("queue"), max_length=NAME)
    job_id = models.CharField(_("job id"), max_length=NAME)
    name = models.CharField(_("job name"), max_length=NAME)
    reason = models.CharField(_("reason"), max_length=64)
    error_type = models.CharField(_("error type"), max_length=NAME, blank=True, default="")
    error_message = models.TextField(_("error message"), blank=True, default="")
    entered_at = MillisecondsField(_("entered"))
    expires_at = MillisecondsField(_("kept until"))
    retries = models.IntegerField(_("retries by itself"), default=0)
    next_retry_at = MillisecondsField(_("next retry by itself"), null=True, blank=True)
    unmet = models.TextField(
        _("dependencies that had not completed"),
        blank=True,
        default="",
        db_default="",
        help_text=_("JSON: queue and job id of each."),
    )

    class Meta:
        db_table = "djqueue_dead_letter"
        verbose_name = _("dead letter")
        verbose_name_plural = _("dead letters")
        permissions = (("retry_deadletter", "Can retry dead letter"),)
        constraints = (models.UniqueConstraint(fields=["queue", "job_id"], name="djqueue_dead_key"),)

    def __str__(self) -> str:
        return f"{self.name} {self.job_id}: {self.reason}"


class KeptJob(models.Model):
    """What a completed or cancelled job takes, where its queue bounds that."""

    queue = models.CharField(max_length=NAME)
    job_id = models.CharField(max_length=NAME)
    outcome = models.CharField(max_length=16)
    held = models.BooleanField(default=False, help_text="Kept for jobs that depend on it: it does not count.")
    ended_at = models.BigIntegerField(help_text="UTC milliseconds, as the next.")
    expires_at = models.BigIntegerField(help_text="After all others if it is kept for ever.")
    size = models.BigIntegerField(help_text="Bytes of its payload and its error.")
    result_size = models.BigIntegerField(default=0, help_text="0: there is none, or it is over.")
    result_until = models.BigIntegerField()

    class Meta:
        db_table = "djqueue_kept_job"
        constraints = (models.UniqueConstraint(fields=["queue", "job_id"], name="djqueue_kept_key"),)
        indexes = (
            models.Index(
                fields=["queue", "outcome", "expires_at", "id"],
                name="djqueue_kept_order",
                condition=Q(held=False),
            ),
            models.Index(
                fields=["queue", "result_until", "id"],
                name="djqueue_kept_results",
                condition=Q(held=False, result_size__gt=0),
            ),
        )

    def __str__(self) -> str:
        return f"{self.queue} {self.job_id}"


class KeptTotal(models.Model):
    """The sums of `KeptJob`, by queue and kind: an outcome, or results."""

    queue = models.CharField(max_length=NAME)
    kind = models.CharField(max_length=16)
    count = models.BigIntegerField(default=0)
    size = models.BigIntegerField(default=0)

    class Meta:
        db_table = "djqueue_kept_total"
        constraints = (models.UniqueConstraint(fields=["queue", "kind"], name="djqueue_total_key"),)

    def __str__(self) -> str:
        return f"{self.queue} {self.kind}"


class OutboxJob(models.Model):
    """A job on its way to Redis: enqueued in a transaction, or while Redis was away."""

    queue = models.CharField(_("queue"), max_length=NAME)
    name = models.CharField(_("job name"), max_length=NAME)
    job_id = models.CharField(_("job id"), max_length=NAME)
    fresh = models.BooleanField(
        _("new id"), default=False, help_text=_("Whether the id was made for this job, and not given.")
    )
    payload = models.BinaryField(_("payload"))
    options = models.BinaryField(
        _("options"), help_text=_("Options that differ from their defaults, as MessagePack.")
    )
    run_at = MillisecondsField(_("not before"), null=True, blank=True)
    created_at = MillisecondsField(_("enqueued"))

    class Meta:
        db_table = "djqueue_outbox_job"
        verbose_name = _("job on its way to Redis")
        verbose_name_plural = _("jobs on their way to Redis")

    def __str__(self) -> str:
        return f"{self.name} {self.job_id}"


class StagedPart(models.Model):
    """What one try of one task has put aside of a write: see `djqueue.storage.staging`."""

    queue = models.CharField(max_length=NAME)
    write = models.CharField(max_length=NAME)
    part = models.CharField(max_length=NAME)
    expires_at = models.BigIntegerField(help_text="UTC milliseconds.")

    class Meta:
        db_table = "djqueue_staged_part"
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["queue", "write", "part"], name="djqueue_part_key"),)
        indexes = (models.Index(fields=["expires_at"], name="djqueue_part_expires"),)

    def __str__(self) -> str:
        return f"{self.queue} {self.write} {self.part}"


class StagedChunk(models.Model):
    """Jobs that come together; once they have come, what became of them."""

    part = models.ForeignKey(StagedPart, on_delete=models.CASCADE, db_index=False)
    number = models.IntegerField()
    jobs = models.BinaryField(
        help_text="Batches, as on the scheduler's socket; empty once they are published."
    )
    queued = models.IntegerField(null=True, help_text="Empty until they are published, as the next three.")
    duplicates = models.IntegerField(null=True)
    completed = models.IntegerField(null=True)
    rejected = models.IntegerField(null=True)

    class Meta:
        db_table = "djqueue_staged_chunk"
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["part", "number"], name="djqueue_chunk_key"),)

    def __str__(self) -> str:
        return f"{self.part_id} #{self.number}"


class Publication(models.Model):
    """The write of an application that is being published to a queue, or was the last that was."""

    queue = models.CharField(max_length=NAME)
    app = models.CharField(max_length=NAME)
    version = models.BigIntegerField()
    write = models.CharField(max_length=NAME)
    parts = models.BinaryField(help_text="Those that count, in order, as MessagePack; empty once it is done.")
    done = models.BooleanField(default=False)
    queued = models.BigIntegerField(default=0)
    duplicates = models.BigIntegerField(default=0)
    completed = models.BigIntegerField(default=0)
    rejected = models.BigIntegerField(default=0)
    lifetime = models.BigIntegerField(
        null=True, help_text="Milliseconds for which it is known when it is done."
    )
    expires_at = models.BigIntegerField(null=True, help_text="UTC milliseconds.")

    class Meta:
        db_table = "djqueue_publication"
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["queue", "app"], name="djqueue_publication_key"),)
        indexes = (
            models.Index(
                fields=["expires_at"],
                name="djqueue_publication_ends",
                condition=Q(expires_at__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return f"{self.queue} {self.app} {self.version}"


class Overlap(models.TextChoices):
    """What becomes of a slot while a job of the schedule is unfinished."""

    ALLOW = "allow", _("enqueue another one")
    SKIP = "skip", _("leave the slot out")
    ONE_PENDING = "one_pending", _("enqueue another one unless one waits already")


class Missed(models.TextChoices):
    """What becomes of slots that passed while no scheduler looked."""

    SKIP = "skip", _("leave them out")
    ONE = "one", _("enqueue one job for all of them")
    ALL = "all", _("enqueue one job for each within the window")


class OnBlackout(models.TextChoices):
    """What becomes of a slot within a blackout."""

    SKIP = "skip", _("leave it out")
    PUT_OFF = "put_off", _("put it off to the end of the blackout")


class ScheduleSource(models.TextChoices):
    """Where a schedule is from."""

    HAND = "hand", _("made here")
    CODE = "code", _("declared in code")
    WITHDRAWN = "withdrawn", _("no longer declared in code")


class CronJobQuerySet(models.QuerySet["CronJob"]):
    """A change of when schedules run has their next runs worked out anew."""

    def update(self, **kwargs: Any) -> int:
        """See `QuerySet.update`."""
        if not TIMING.isdisjoint(kwargs):
            kwargs = {"next_run_at": None, "firing_at": None, **kwargs}
        return super().update(**kwargs)


class CronJob(models.Model):
    """A job enqueued again and again by a schedule. See `djqueue.schedules.Schedule`."""

    # The ids of its jobs hold the name and the time, and an id is no longer than NAME.
    name = models.CharField(_("name"), max_length=200, unique=True)
    queue = models.CharField(
        _("queue"), max_length=NAME, blank=True, default="", help_text=_("Empty: the job's own.")
    )
    job_name = models.CharField(_("job name"), max_length=NAME)
    schedule = models.CharField(
        _("schedule"),
        max_length=200,
        blank=True,
        default="",
        help_text=_("Five or six cron fields, or @hourly and the like; or give an interval."),
    )
    every = models.DurationField(
        _("interval"),
        null=True,
        blank=True,
        help_text=_("As 1:30:00. Counted from the start, or from 1970 on."),
    )
    timezone = models.CharField(_("time zone"), max_length=64, default="UTC")
    start_at = MillisecondsField(_("start"), null=True, blank=True, help_text=_("No run is earlier."))
    end_at = MillisecondsField(_("end"), null=True, blank=True, help_text=_("No run is later."))
    max_executions = models.PositiveIntegerField(
        _("most executions"), null=True, blank=True, help_text=_("It is over after so many.")
    )
    jitter = models.DurationField(
        _("jitter"),
        default=timedelta,
        blank=True,
        help_text=_("Each run comes later by a part of this, which its name and time decide."),
    )
    overlap = models.CharField(
        _("while a job is unfinished"), max_length=16, choices=Overlap.choices, default=Overlap.ALLOW
    )
    missed = models.CharField(_("missed runs"), max_length=16, choices=Missed.choices, default=Missed.ONE)
    missed_window = models.DurationField(
        _("window"), default=timedelta(days=1), help_text=_("How old a missed run may be to be made up for.")
    )
    blackouts = models.TextField(
        _("blackouts"),
        blank=True,
        default="",
        help_text=_(
            "One a line, in the time zone above: 2026-12-24, 2026-12-24..2027-01-02, 12-25, sat,sun, "
            "22:00-06:00, mon-fri 09:00-17:00."
        ),
    )
    on_blackout = models.CharField(
        _("runs in a blackout"), max_length=16, choices=OnBlackout.choices, default=OnBlackout.SKIP
    )
    args = models.JSONField(_("positional arguments"), default=list, blank=True)
    kwargs = models.JSONField(_("keyword arguments"), default=dict, blank=True)
    enabled = models.BooleanField(_("enabled"), default=True)
    source = models.CharField(
        _("source"),
        max_length=16,
        choices=ScheduleSource.choices,
        default=ScheduleSource.HAND,
        editable=False,
    )
    next_run_at = MillisecondsField(_("next run"), null=True, blank=True, editable=False)
    last_run_at = MillisecondsField(_("last run"), null=True, blank=True, editable=False)
    executions = models.BigIntegerField(_("executions"), default=0, editable=False)
    firing_at = MillisecondsField(
        null=True,
        blank=True,
        editable=False,
        help_text="Since when somebody is at the run that is due; empty: nobody has begun with it.",
    )
    firing_by = models.CharField(
        max_length=NAME, blank=True, default="", editable=False, help_text="Which process that is."
    )
    skipped_at = MillisecondsField(_("last left out"), null=True, blank=True, editable=False)
    skip_reason = models.TextField(_("why"), blank=True, default="", editable=False)
    unfinished = models.JSONField(
        default=list,
        blank=True,
        editable=False,
        help_text="Queue and id of its jobs that had not ended at its last run, if runs may not overlap.",
    )

    objects = CronJobQuerySet.as_manager()

    class Meta:
        db_table = "djqueue_cron_job"
        verbose_name = _("cron job")
        verbose_name_plural = _("cron jobs")
        permissions = (("run_cronjob", "Can run cron job now"),)
        constraints = (
            models.CheckConstraint(
                condition=(~Q(schedule="") & Q(every__isnull=True)) | Q(schedule="", every__gt=timedelta()),
                name="djqueue_cron_one_form",
                violation_error_message=_("Give a cron line or an interval."),
            ),
            models.CheckConstraint(
                condition=Q(start_at__isnull=True) | Q(end_at__isnull=True) | Q(end_at__gt=F("start_at")),
                name="djqueue_cron_ends_later",
                violation_error_message=_("The end is not later than the start."),
            ),
            models.CheckConstraint(
                condition=Q(jitter__gte=timedelta()),
                name="djqueue_cron_jitter",
                violation_error_message=_("The jitter is negative."),
            ),
        )
        indexes = (models.Index(fields=["next_run_at"], name="djqueue_cron_due", condition=Q(enabled=True)),)

    def __str__(self) -> str:
        return self.name

    def timing(self) -> Schedule:
        """When it runs."""
        return Schedule(
            cron=self.schedule,
            every=None if self.every is None else _whole_milliseconds(self.every),
            timezone=self.timezone,
            start_at=_instant(self.start_at),
            end_at=_instant(self.end_at),
            max_executions=self.max_executions,
            jitter=_whole_milliseconds(self.jitter),
            overlap=self.overlap,
            missed=self.missed,
            missed_window=_whole_milliseconds(self.missed_window),
            blackouts=tuple(line.strip() for line in self.blackouts.splitlines() if line.strip()),
            on_blackout=self.on_blackout,
        )

    def next_slot(self, now: int) -> int | None:
        """The first slot that is neither past nor done, in UTC milliseconds; None if it is over.

        Raises OptionError if it is not readable.
        """
        if self.max_executions is not None and self.executions >= self.max_executions:
            return None
        return self.timing().next_slot(max(now, _instant(self.last_run_at) or 0))

    def clean(self) -> None:
        """Check what only this package knows: the schedule, the zone, the queue, the arguments."""
        self.args = [] if self.args is None else self.args
        self.kwargs = {} if self.kwargs is None else self.kwargs
        self.jitter = self.jitter or timedelta()
        wrong: dict[str, Any] = {
            "schedule" if field == "cron" else field: _sentence(problem)
            for field, problem in self.timing().problems().items()
        }
        settings = get_settings()
        if self.queue and settings.strict_queues and self.queue not in settings.queues:
            wrong["queue"] = _("The settings list the queues, and this is not one of them.")
        if not isinstance(self.args, list):
            wrong["args"] = _("Expected a list, such as [1, 2].")
        if not isinstance(self.kwargs, dict):
            wrong["kwargs"] = _('Expected an object, such as {"key": 1}.')
        for field in ("args", "kwargs"):
            if field not in wrong and not _is_json(getattr(self, field)):
                wrong[field] = _("NaN and infinities are no values of JSON.")
        if not wrong and self.enabled and self.next_slot(SYSTEM_CLOCK.now()) is None:
            over = "max_executions" if self.end_at is None else "end_at"
            wrong["schedule" if self.end_at is None and self.max_executions is None else over] = _(
                "It is over: there is no further run."
            )
        if wrong and self.source != ScheduleSource.HAND:
            # What code declares is not edited, so that no form has these fields.
            raise ValidationError([f"{field}: {text}" for field, text in wrong.items()])
        if wrong:
            raise ValidationError(wrong)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save; a change of when it runs, or that it does, has the next run worked out anew.

        A run that is overdue stays due if neither is changed. The scheduler's own columns are left to it.
        Raises OptionError for a schedule that is none.
        """
        given = kwargs.get("update_fields")
        if given is None or not (TIMING | {"enabled"}).isdisjoint(given):
            there = self._there(kwargs.get("using"))
            if there is None:
                self._work_out(_instant(self.next_run_at))
            else:
                self.refresh_from_db(using=kwargs.get("using"), fields=KEPT)
                kwargs["update_fields"] = {*(given or WRITTEN)}
                if there != self._timing_fields():
                    self.firing_at = None
                    self._work_out(None)
                    kwargs["update_fields"] |= {"next_run_at", "firing_at"}
        super().save(*args, **kwargs)

    def _work_out(self, overdue: int | None) -> None:
        now = SYSTEM_CLOCK.now()
        slot = self.next_slot(now if overdue is None else min(now, overdue - 1))
        self.next_run_at = None if slot is None or not self.enabled else to_datetime(slot)

    def _there(self, using: str | None) -> tuple[Any, ...] | None:
        if self.pk is None:
            return None
        rows = CronJob.objects.using(using or self._state.db or DEFAULT_DB_ALIAS)
        return rows.filter(pk=self.pk).values_list(*sorted(TIMING), "enabled").first()

    def _timing_fields(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in (*sorted(TIMING), "enabled"))


TIMING = frozenset(
    {
        "schedule",
        "every",
        "timezone",
        "start_at",
        "end_at",
        "max_executions",
        "blackouts",
        "on_blackout",
    }
)
"""Fields of a cron job that say when it runs."""
KEPT = (
    "next_run_at",
    "last_run_at",
    "executions",
    "firing_at",
    "firing_by",
    "skipped_at",
    "skip_reason",
    "unfinished",
)
"""Fields of a cron job that its scheduler keeps."""
WRITTEN = frozenset(
    field.name for field in CronJob._meta.concrete_fields if not field.primary_key and field.name not in KEPT
)


def _whole_milliseconds(value: timedelta) -> int:
    return value // timedelta(milliseconds=1)


def _instant(value: datetime | None) -> int | None:
    if value is None:
        return None
    # In a project without time zones: it means the project's own.
    return to_milliseconds(timezone.make_aware(value) if timezone.is_naive(value) else value)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _sentence(problem: str) -> str:
    return f"{problem[:1].upper()}{problem[1:]}."


class QueueState(models.Model):
    """What was said to a queue while it ran."""

    name = models.CharField(_("name"), max_length=NAME, unique=True)
    paused = models.BooleanField(_("paused"), default=False)
    rate_capacity = models.IntegerField(_("starts"), null=True, blank=True)
    rate_per = models.BigIntegerField(_("per milliseconds"), null=True, blank=True)
    concurrency = models.IntegerField(_("active at once"), null=True, blank=True)

    class Meta:
        db_table = "djqueue_queue_state"
        verbose_name = _("queue")
        verbose_name_plural = _("queues")
        permissions = (("pause_queuestate", "Can pause and resume queue"),)

    def __str__(self) -> str:
        return self.name


class GroupState(models.Model):
    """What was said to a group of a queue while it ran; without a group's name, to every group, and the
    mode of the queue.
    """

    queue = models.CharField(_("queue"), max_length=NAME)
    group = models.CharField(_("group"), max_length=NAME, blank=True)
    concurrency = models.IntegerField(_("active at once"), null=True, blank=True)
    paused = models.BooleanField(_("paused"), default=False)
    mode = models.CharField(_("mode"), max_length=16, blank=True)
    rate_capacity = models.IntegerField(_("starts"), null=True, blank=True)
    rate_per = models.BigIntegerField(_("per milliseconds"), null=True, blank=True)
    weight = models.IntegerField(_("weight"), null=True, blank=True)

    class Meta:
        db_table = "djqueue_group_state"
        verbose_name = _("group")
        verbose_name_plural = _("groups")
        constraints = (models.UniqueConstraint(fields=("queue", "group"), name="djqueue_group_state_key"),)

    def __str__(self) -> str:
        return f"{self.queue}: {self.group}"


class LimiterState(models.Model):
    """What was said to a limiter while it ran."""

    name = models.CharField(_("name"), max_length=NAME, unique=True)
    rate_capacity = models.IntegerField(_("starts"), null=True, blank=True)
    rate_per = models.BigIntegerField(_("per milliseconds"), null=True, blank=True)
    concurrency = models.IntegerField(_("active at once"), null=True, blank=True)

    class Meta:
        db_table = "djqueue_limiter_state"
        verbose_name = _("limiter")
        verbose_name_plural = _("limiters")

    def __str__(self) -> str:
        return self.name


class MetricBucket(models.Model):
    """What happened in a queue, or with its jobs of one name, in one stretch of time."""

    queue = models.CharField(_("queue"), max_length=NAME)
    name = models.CharField(_("job name"), max_length=NAME, blank=True, help_text=_("Empty: of all jobs."))
    tier = models.IntegerField(_("length"), help_text=_("Milliseconds: a minute, an hour or a day."))
    start = MillisecondsField(_("start"))
    enqueued = models.BigIntegerField(_("enqueued"), default=0)
    started = models.BigIntegerField(_("started"), default=0)
    completed = models.BigIntegerField(_("completed"), default=0)
    retried = models.BigIntegerField(_("retried"), default=0)
    failed = models.BigIntegerField(_("failed"), default=0)
    cancelled = models.BigIntegerField(_("cancelled"), default=0)
    stalled = models.BigIntegerField(_("stalled"), default=0)
    wait = models.BinaryField(_("waits"), help_text=_("Histogram: how many waited how long, as MessagePack."))
    run = models.BinaryField(_("runs"), help_text=_("Histogram: how many ran how long, as MessagePack."))

    class Meta:
        db_table = "djqueue_metric_bucket"
        verbose_name = _("bucket of metrics")
        verbose_name_plural = _("buckets of metrics")
        constraints = (
            models.UniqueConstraint(fields=("queue", "name", "tier", "start"), name="djqueue_metric_key"),
        )
        indexes = (models.Index(fields=["tier", "start"], name="djqueue_metric_start"),)

    def __str__(self) -> str:
        return f"{self.queue} {self.start:%Y-%m-%d %H:%M}"


class Rollup(models.Model):
    """What happened in one hour, of one queue and job, as Spark has reckoned it."""

    hour = MillisecondsField(_("hour"))
    queue = models.CharField(_("queue"), max_length=NAME)
    name = models.CharField(_("job name"), max_length=NAME, blank=True, default="")
    enqueued = models.BigIntegerField(_("enqueued"), default=0)
    completed = models.BigIntegerField(_("completed"), default=0)
    failed = models.BigIntegerField(_("failed"), default=0)
    cancelled = models.BigIntegerField(_("cancelled"), default=0)
    retried = models.BigIntegerField(_("retried"), default=0, help_text=_("Runs, as the next."))
    stalled = models.BigIntegerField(_("stalled"), default=0)
    wait_p50 = models.BigIntegerField(
        _("wait, 50 %"), null=True, blank=True, help_text=_("Milliseconds, as the others.")
    )
    wait_p95 = models.BigIntegerField(_("wait, 95 %"), null=True, blank=True)
    wait_p99 = models.BigIntegerField(_("wait, 99 %"), null=True, blank=True)
    run_p50 = models.BigIntegerField(_("run, 50 %"), null=True, blank=True)
    run_p95 = models.BigIntegerField(_("run, 95 %"), null=True, blank=True)
    run_p99 = models.BigIntegerField(_("run, 99 %"), null=True, blank=True)
    reasons = models.JSONField(
        _("reasons"), default=dict, blank=True, help_text=_("How many failed for which reason.")
    )
    written_at = MillisecondsField(_("written"))

    class Meta:
        db_table = "djqueue_rollup"
        verbose_name = _("rollup")
        verbose_name_plural = _("rollups")
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=("hour", "queue", "name"), name="djqueue_rollup_key"),)

    def __str__(self) -> str:
        return f"{self.queue} {self.name} {self.hour:%Y-%m-%d %H:%M}"


class WorkerState(models.Model):
    """A worker, as it last reported itself."""

    worker_id = models.CharField(_("worker id"), max_length=NAME, unique=True)
    host = models.CharField(_("host"), max_length=NAME)
    pid = models.IntegerField(_("process id"))
    queues = models.JSONField(_("queues"), null=True, blank=True)
    names = models.JSONField(_("job names"), default=list)
    concurrency = models.IntegerField(_("slots"))
    started_at = MillisecondsField(_("started"))
    seen_at = MillisecondsField(_("last seen"))
    active = models.IntegerField(_("active jobs"), default=0)
    state = models.CharField(_("state"), max_length=16)
    about = models.JSONField(
        _("more"),
        null=True,
        blank=True,
        help_text=_("Kind, heartbeat, memory, versions, and the jobs that it runs."),
    )

    class Meta:
        db_table = "djqueue_worker_state"
        verbose_name = _("worker")
        verbose_name_plural = _("workers")

    def __str__(self) -> str:
        return self.worker_id


class SchedulerLease(models.Model):
    """Which process is the scheduler of this database: one row."""

    name = models.CharField(max_length=32, primary_key=True)
    holder = models.CharField(max_length=NAME)
    host = models.CharField(max_length=NAME)
    pid = models.IntegerField()
    address = models.CharField(max_length=NAME, help_text="Where its socket listens.")
    generation = models.BigIntegerField(default=0, help_text="Raised by each new holder.")
    renewed_at = MillisecondsField()
    expires_at = MillisecondsField()
    clock_offset = models.BigIntegerField(
        null=True, help_text="Milliseconds from the machine's start to the wall clock that jobs follow."
    )

    class Meta:
        db_table = "djqueue_scheduler_lease"

    def __str__(self) -> str:
        return f"{self.holder} at {self.address}"


class AuditEvent(models.Model):
    """What somebody did, or was refused, in the dashboard."""

    at = MillisecondsField(_("at"))
    user = models.CharField(_("user"), max_length=NAME, help_text=_("The name that the user had then."))
    user_pk = models.CharField(max_length=NAME, blank=True, default="", editable=False)
    action = models.CharField(_("action"), max_length=64)
    queue = models.CharField(_("queue"), max_length=NAME, blank=True, default="")
    job_id = models.CharField(_("job id"), max_length=NAME, blank=True, default="")
    count = models.IntegerField(_("jobs"), default=0)
    refused = models.BooleanField(_("refused"), default=False)
    detail = models.JSONField(_("details"), default=dict, blank=True)

    class Meta:
        db_table = "djqueue_audit_event"
        verbose_name = _("activity")
        verbose_name_plural = _("activities")
        default_permissions = ("view",)
        indexes = (
            models.Index(fields=["action", "id"], name="djqueue_audit_action"),
            models.Index(fields=["user", "id"], name="djqueue_audit_user"),
            models.Index(fields=["queue", "job_id"], name="djqueue_audit_job"),
        )

    def __str__(self) -> str:
        return f"{self.user}: {self.action} {self.queue} {self.job_id}".rstrip()


class Mark(models.Model):
    """Something that happened at a time, shown in charts: a deploy, mostly."""

    at = MillisecondsField(_("at"))
    label = models.CharField(_("label"), max_length=NAME)
    follows = models.BigIntegerField(
        unique=True,
        null=True,
        blank=True,
        editable=False,
        help_text=_("Of a version that workers noted: the one before it, or 0."),
    )

    class Meta:
        db_table = "djqueue_mark"
        verbose_name = _("mark")
        verbose_name_plural = _("marks")
        default_permissions = ("view",)
        indexes = (models.Index(fields=["at"], name="djqueue_mark_at"),)

    def __str__(self) -> str:
        return self.label


class Revision(models.TextChoices):
    """What was done with the payload that somebody gave a job in the dashboard."""

    UNKNOWN = "", _("not known to have been done")
    UPDATED = "updated", _("changed before it started")
    RETRIED = "retried", _("retried with another one")
    COPIED = "copied", _("enqueued anew with another one")


class PayloadVersion(models.Model):
    """A payload that a job had until somebody gave it, or a new job made from it, another one.

    Written before the storage is asked: whoever dies then, the payload is here, and `outcome` is empty.
    """

    queue = models.CharField(_("queue"), max_length=NAME)
    job_id = models.CharField(_("job id"), max_length=NAME)
    at = MillisecondsField(_("at"))
    user = models.CharField(_("user"), max_length=NAME, help_text=_("The name that the user had then."))
    payload = models.BinaryField(_("payload"))
    content_type = models.CharField(_("content type"), max_length=100)
    outcome = models.CharField(
        _("outcome"), max_length=16, choices=Revision.choices, blank=True, default=Revision.UNKNOWN
    )
    copy_id = models.CharField(
        _("new job"), max_length=NAME, blank=True, default="", help_text=_("In the same queue.")
    )

    class Meta:
        db_table = "djqueue_payload_version"
        verbose_name = _("payload version")
        verbose_name_plural = _("payload versions")
        default_permissions = ()
        indexes = (
            models.Index(fields=["queue", "job_id"], name="djqueue_version_job"),
            models.Index(fields=["queue", "copy_id"], name="djqueue_version_copy", condition=~Q(copy_id="")),
            models.Index(fields=["at"], name="djqueue_version_at"),
        )

    def __str__(self) -> str:
        return f"{self.queue} {self.job_id} {self.pk}"


class BulkKind(models.TextChoices):
    """What a bulk operation does to each job."""

    RETRY = "retry", _("retry dead letters")
    PURGE = "purge", _("delete dead letters")
    CANCEL = "cancel", _("cancel jobs")
    DELETE = "delete", _("delete jobs")
    PROMOTE = "promote", _("run delayed jobs now")
    CLEAN = "clean", _("forget jobs of a queue")
    OBLITERATE = "obliterate", _("forget a queue")


class BulkState(models.TextChoices):
    """How far a bulk operation is."""

    PLANNED = "planned", _("begins soon")
    RUNNING = "running", _("running")
    DONE = "done", _("done")
    ABORTED = "aborted", _("aborted")


class BulkOperation(models.Model):
    """Something that is done to all jobs that match, part by part, by whoever runs jobs."""

    kind = models.CharField(_("what"), max_length=16, choices=BulkKind.choices)
    state = models.CharField(_("state"), max_length=16, choices=BulkState.choices, default=BulkState.PLANNED)
    filter = models.JSONField(_("which jobs"), default=dict, help_text=_("As it was when it was begun."))
    user = models.CharField(_("user"), max_length=NAME, blank=True, default="")
    rate = models.PositiveIntegerField(_("jobs a second"), null=True, blank=True)
    created_at = MillisecondsField(_("begun"))
    start_at = MillisecondsField(_("starts"), help_text=_("Until then it can be undone as a whole."))
    started_at = MillisecondsField(_("started"), null=True, blank=True)
    finished_at = MillisecondsField(_("ended"), null=True, blank=True)
    expected = models.IntegerField(_("jobs that matched"), default=0)
    looked_at = models.IntegerField(_("looked at"), default=0)
    done = models.IntegerField(_("done"), default=0)
    refused = models.JSONField(_("not done"), default=dict, blank=True, help_text=_("Reasons with numbers."))
    place = models.JSONField(default=dict, blank=True, editable=False, help_text="Where it goes on.")
    error = models.TextField(_("error"), blank=True, default="")
    holder = models.CharField(max_length=NAME, blank=True, default="", editable=False)
    held_until = MillisecondsField(default=0, editable=False)

    class Meta:
        db_table = "djqueue_bulk_operation"
        verbose_name = _("bulk operation")
        verbose_name_plural = _("bulk operations")
        default_permissions = ("view",)
        indexes = (
            models.Index(
                fields=["id"], name="djqueue_bulk_open", condition=Q(state__in=("planned", "running"))
            ),
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.pk}"


class Import(models.Model):
    """The report of a bulk write: see `djqueue.storage.bulkwrites`."""

    write = models.CharField(_("write"), max_length=NAME, unique=True)
    updated_at = MillisecondsField(_("changed"))
    revision = models.IntegerField(default=1, editable=False, help_text="How often it was written.")
    report = models.JSONField(_("report"), default=dict)

    class Meta:
        db_table = "djqueue_import"
        verbose_name = _("bulk import")
        verbose_name_plural = _("bulk imports")
        default_permissions = ()
        indexes = (models.Index(fields=["updated_at", "id"], name="djqueue_import_updated"),)

    def __str__(self) -> str:
        return self.write


class Dashboard(models.Model):
    """No table: what the rights of the dashboard hang on. Those that are a job's are `Job`'s."""

    class Meta:
        managed = False
        verbose_name = _("dashboard")
        verbose_name_plural = _("dashboard")
        default_permissions = ()
        permissions = (
            ("view_dashboard", "Can see the dashboard"),
            ("view_payload", "Can reveal payloads and results"),
            ("enqueue_job", "Can enqueue jobs"),
            ("edit_job", "Can edit a job's payload, priority and time"),
            ("pause_queue", "Can pause and resume queues"),
            ("configure_queue", "Can set limits of queues and groups"),
            ("drain_queue", "Can drain, clean and obliterate queues"),
            ("manage_dlq", "Can retry and purge dead letters by the group"),
            ("manage_cron", "Can steer schedules in the dashboard"),
            ("control_worker", "Can steer workers"),
            ("run_backup", "Can make backups"),
            ("view_storage", "Can see the storage's state"),
        )

    def __str__(self) -> str:
        return "dashboard"
