"""Cron jobs: jobs that a schedule enqueues."""

import json
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ValidationError
from django.db import DEFAULT_DB_ALIAS, models
from django.db.models import F, Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.fields import NAME_LENGTH, MillisecondsField

if TYPE_CHECKING:
    from djqueue.schedules import Schedule


class Overlap(models.TextChoices):
    """The treatment of a run that is due while an earlier job of the schedule is unfinished."""

    ALLOW = "allow", _("enqueue another job")
    SKIP = "skip", _("skip the run")
    ONE_PENDING = "one_pending", _("enqueue another job unless one is waiting")


class Missed(models.TextChoices):
    """The treatment of runs that were due while no scheduler was running."""

    SKIP = "skip", _("skip them")
    ONE = "one", _("enqueue one job for all missed runs")
    ALL = "all", _("enqueue one job per missed run within the window")


class OnBlackout(models.TextChoices):
    """The treatment of a run that is due during a blackout."""

    SKIP = "skip", _("skip the run")
    PUT_OFF = "put_off", _("postpone the run until the blackout ends")


class ScheduleSource(models.TextChoices):
    """Where a schedule was defined."""

    HAND = "hand", _("created by hand")
    CODE = "code", _("declared in code")
    WITHDRAWN = "withdrawn", _("no longer declared in code")


class CronJobQuerySet(models.QuerySet["CronJob"]):
    """A QuerySet whose `update` schedules the next runs again if their timing changes."""

    def update(self, **kwargs: Any) -> int:
        """Update rows; a change of their timing clears their next run, which the scheduler then computes."""
        if not TIMING_FIELDS.isdisjoint(kwargs):
            kwargs = {"next_run_at": None, "firing_at": None, **kwargs}
        return super().update(**kwargs)


class CronJob(models.Model):
    """A job that a schedule enqueues repeatedly. See `djqueue.schedules.Schedule`."""

    # Job ids contain the name and the time, and must fit into NAME_LENGTH.
    name = models.CharField(_("name"), max_length=200, unique=True)
    queue = models.CharField(
        _("queue"),
        max_length=NAME_LENGTH,
        blank=True,
        default="",
        help_text=_("Leave empty to use the job's own queue."),
    )
    job_name = models.CharField(_("job name"), max_length=NAME_LENGTH)
    schedule = models.CharField(
        _("schedule"),
        max_length=200,
        blank=True,
        default="",
        help_text=_("Five or six cron fields, or an alias such as @hourly. Leave empty to use an interval."),
    )
    every = models.DurationField(
        _("interval"),
        null=True,
        blank=True,
        help_text=_("For example 1:30:00. Counted from the start, or from 1970 if there is no start."),
    )
    timezone = models.CharField(_("time zone"), max_length=64, default="UTC")
    start_at = MillisecondsField(_("start"), null=True, blank=True, help_text=_("Earliest time of a run."))
    end_at = MillisecondsField(_("end"), null=True, blank=True, help_text=_("Latest time of a run."))
    max_executions = models.PositiveIntegerField(
        _("maximum executions"), null=True, blank=True, help_text=_("The schedule ends after this many runs.")
    )
    jitter = models.DurationField(
        _("jitter"),
        default=timedelta,
        blank=True,
        help_text=_(
            "Delays each run by up to this long. The delay depends on the schedule's name and the time."
        ),
    )
    overlap = models.CharField(
        _("if the previous job is unfinished"), max_length=16, choices=Overlap.choices, default=Overlap.ALLOW
    )
    missed = models.CharField(_("missed runs"), max_length=16, choices=Missed.choices, default=Missed.ONE)
    missed_window = models.DurationField(
        _("window"),
        default=timedelta(days=1),
        help_text=_("Maximum age of a missed run that is still enqueued."),
    )
    blackouts = models.TextField(
        _("blackouts"),
        blank=True,
        default="",
        help_text=_(
            "One per line, in the time zone above: 2026-12-24, 2026-12-24..2027-01-02, 12-25, sat,sun, "
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
        help_text="When a process started to enqueue the due run; empty if none has.",
    )
    firing_by = models.CharField(
        max_length=NAME_LENGTH,
        blank=True,
        default="",
        editable=False,
        help_text="Process that enqueues the due run.",
    )
    skipped_at = MillisecondsField(_("last skipped"), null=True, blank=True, editable=False)
    skip_reason = models.TextField(_("skip reason"), blank=True, default="", editable=False)
    unfinished = models.JSONField(
        default=list,
        blank=True,
        editable=False,
        help_text="Queue and job ID of each job unfinished at the last run, if runs may not overlap.",
    )

    objects = CronJobQuerySet.as_manager()

    class Meta:
        db_table = "djqueue_cron_job"
        verbose_name = _("cron job")
        verbose_name_plural = _("cron jobs")
        default_permissions = ("view",)
        constraints = (
            models.CheckConstraint(
                condition=(~Q(schedule="") & Q(every__isnull=True)) | Q(schedule="", every__gt=timedelta()),
                name="djqueue_cron_one_form",
                violation_error_message=_("Enter either a cron expression or an interval."),
            ),
            models.CheckConstraint(
                condition=Q(start_at__isnull=True) | Q(end_at__isnull=True) | Q(end_at__gt=F("start_at")),
                name="djqueue_cron_ends_later",
                violation_error_message=_("The end must be later than the start."),
            ),
            models.CheckConstraint(
                condition=Q(jitter__gte=timedelta()),
                name="djqueue_cron_jitter",
                violation_error_message=_("The jitter must not be negative."),
            ),
        )
        indexes = (models.Index(fields=["next_run_at"], name="djqueue_cron_due", condition=Q(enabled=True)),)

    def __str__(self) -> str:
        return self.name

    def timing(self) -> "Schedule":
        """Return the schedule that the fields describe."""
        from djqueue.schedules import Schedule

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
        """Return the time of the next run in UTC milliseconds; None if the schedule has ended.

        Raises:
            OptionError: The schedule is invalid.
        """
        if self.max_executions is not None and self.executions >= self.max_executions:
            return None
        return self.timing().next_slot(max(now, _instant(self.last_run_at) or 0))

    def clean(self) -> None:
        """Validate the schedule, the time zone, the queue and the arguments."""
        from djqueue.conf import get_settings

        self.args = [] if self.args is None else self.args
        self.kwargs = {} if self.kwargs is None else self.kwargs
        self.jitter = self.jitter or timedelta()
        errors: dict[str, Any] = {
            "schedule" if field == "cron" else field: _sentence(problem)
            for field, problem in self.timing().problems().items()
        }
        settings = get_settings()
        if self.queue and settings.strict_queues and self.queue not in settings.queues:
            errors["queue"] = _("STRICT_QUEUES is on, and QUEUES does not list this queue.")
        if not isinstance(self.args, list):
            errors["args"] = _("Expected a list, such as [1, 2].")
        if not isinstance(self.kwargs, dict):
            errors["kwargs"] = _('Expected an object, such as {"key": 1}.')
        for field in ("args", "kwargs"):
            if field not in errors and not _is_json(getattr(self, field)):
                errors[field] = _("NaN and infinity are not valid in JSON.")
        if not errors and self.enabled and self.next_slot(SYSTEM_CLOCK.now()) is None:
            field = "schedule" if self.max_executions is None else "max_executions"
            errors[field if self.end_at is None else "end_at"] = _("The schedule has no further runs.")
        if errors and self.source != ScheduleSource.HAND:
            # Schedules declared in code cannot be edited, so no form has these fields.
            raise ValidationError([f"{field}: {text}" for field, text in errors.items()])
        if errors:
            raise ValidationError(errors)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save, and compute the next run if the timing or `enabled` changed.

        If neither changed, an overdue run stays due. Columns maintained by the scheduler are not written.

        Raises:
            OptionError: The schedule is invalid.
        """
        update_fields = kwargs.get("update_fields")
        if update_fields is None or not (TIMING_FIELDS | {"enabled"}).isdisjoint(update_fields):
            stored = self._stored_timing(kwargs.get("using"))
            if stored is None:
                self._compute_next_run(_instant(self.next_run_at))
            else:
                self.refresh_from_db(using=kwargs.get("using"), fields=SCHEDULER_FIELDS)
                kwargs["update_fields"] = {*(update_fields or USER_FIELDS)}
                if stored != self._timing():
                    self.firing_at = None
                    self._compute_next_run(None)
                    kwargs["update_fields"] |= {"next_run_at", "firing_at"}
        super().save(*args, **kwargs)

    def _compute_next_run(self, overdue: int | None) -> None:
        now = SYSTEM_CLOCK.now()
        slot = self.next_slot(now if overdue is None else min(now, overdue - 1))
        self.next_run_at = None if slot is None or not self.enabled else to_datetime(slot)

    def _stored_timing(self, using: str | None) -> tuple[Any, ...] | None:
        if self.pk is None:
            return None
        rows = CronJob.objects.using(using or self._state.db or DEFAULT_DB_ALIAS)
        return rows.filter(pk=self.pk).values_list(*sorted(TIMING_FIELDS), "enabled").first()

    def _timing(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in (*sorted(TIMING_FIELDS), "enabled"))


TIMING_FIELDS = frozenset(
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
"""Fields of a cron job that determine when it runs."""


SCHEDULER_FIELDS = (
    "next_run_at",
    "last_run_at",
    "executions",
    "firing_at",
    "firing_by",
    "skipped_at",
    "skip_reason",
    "unfinished",
)
"""Fields of a cron job that the scheduler maintains."""


USER_FIELDS = frozenset(
    field.name
    for field in CronJob._meta.concrete_fields
    if not field.primary_key and field.name not in SCHEDULER_FIELDS
)


def _whole_milliseconds(value: timedelta) -> int:
    return value // timedelta(milliseconds=1)


def _instant(value: datetime | None) -> int | None:
    if value is None:
        return None
    # Without USE_TZ, a naive time is in the time zone of the project.
    return to_milliseconds(timezone.make_aware(value) if timezone.is_naive(value) else value)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _sentence(problem: str) -> str:
    return f"{problem[:1].upper()}{problem[1:]}."
