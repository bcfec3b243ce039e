"""Data of the dashboard: the audit log, replaced payloads, bulk operations, and its permissions."""

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from djqueue.fields import NAME_LENGTH, MillisecondsField


class AuditEvent(models.Model):
    """An action in the dashboard, performed or refused."""

    at = MillisecondsField(_("time"))
    user = models.CharField(_("user"), max_length=NAME_LENGTH, help_text=_("Username at that time."))
    user_pk = models.CharField(max_length=NAME_LENGTH, blank=True, default="", editable=False)
    action = models.CharField(_("action"), max_length=64)
    queue = models.CharField(_("queue"), max_length=NAME_LENGTH, blank=True, default="")
    job_id = models.CharField(_("job ID"), max_length=NAME_LENGTH, blank=True, default="")
    count = models.IntegerField(_("jobs"), default=0)
    refused = models.BooleanField(_("refused"), default=False)
    detail = models.JSONField(_("details"), default=dict, blank=True)

    class Meta:
        db_table = "djqueue_audit_event"
        verbose_name = _("activity log entry")
        verbose_name_plural = _("activity log entries")
        default_permissions = ()
        indexes = (
            models.Index(fields=["action", "id"], name="djqueue_audit_action"),
            models.Index(fields=["user", "id"], name="djqueue_audit_user"),
            models.Index(fields=["queue", "job_id"], name="djqueue_audit_job"),
        )

    def __str__(self) -> str:
        return f"{self.user}: {self.action} {self.queue} {self.job_id}".rstrip()


class Revision(models.TextChoices):
    """The use of a payload that was entered in the dashboard."""

    UNKNOWN = "", _("outcome unknown")
    UPDATED = "updated", _("replaced before the job started")
    RETRIED = "retried", _("retried with a new payload")
    COPIED = "copied", _("enqueued again with a new payload")


class PayloadVersion(models.Model):
    """A payload that was replaced in the dashboard, for the job itself or for a copy of it.

    The row is written before the storage changes the job, so the old payload survives a crash in between;
    `outcome` stays empty then.
    """

    queue = models.CharField(_("queue"), max_length=NAME_LENGTH)
    job_id = models.CharField(_("job ID"), max_length=NAME_LENGTH)
    at = MillisecondsField(_("time"))
    user = models.CharField(_("user"), max_length=NAME_LENGTH, help_text=_("Username at that time."))
    payload = models.BinaryField(_("payload"))
    content_type = models.CharField(_("content type"), max_length=100)
    outcome = models.CharField(
        _("outcome"), max_length=16, choices=Revision.choices, blank=True, default=Revision.UNKNOWN
    )
    copy_id = models.CharField(
        _("new job"), max_length=NAME_LENGTH, blank=True, default="", help_text=_("In the same queue.")
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
    """The action that a bulk operation applies to each job."""

    RETRY = "retry", _("retry dead letters")
    PURGE = "purge", _("delete dead letters")
    CANCEL = "cancel", _("cancel jobs")
    DELETE = "delete", _("delete jobs")
    PROMOTE = "promote", _("run delayed jobs now")
    CLEAN = "clean", _("clean queue")
    OBLITERATE = "obliterate", _("obliterate queue")


class BulkState(models.TextChoices):
    """The progress of a bulk operation."""

    PLANNED = "planned", _("planned")
    RUNNING = "running", _("running")
    DONE = "done", _("done")
    ABORTED = "aborted", _("aborted")


class BulkOperation(models.Model):
    """An action applied to all jobs that match a filter, in batches, by the workers."""

    kind = models.CharField(_("operation"), max_length=16, choices=BulkKind.choices)
    state = models.CharField(_("state"), max_length=16, choices=BulkState.choices, default=BulkState.PLANNED)
    filter = models.JSONField(_("filter"), default=dict, help_text=_("Filter at the time of the request."))
    user = models.CharField(_("user"), max_length=NAME_LENGTH, blank=True, default="")
    rate = models.PositiveIntegerField(_("jobs per second"), null=True, blank=True)
    created_at = MillisecondsField(_("requested"))
    start_at = MillisecondsField(_("starts"), help_text=_("Can be undone until this time."))
    started_at = MillisecondsField(_("started"), null=True, blank=True)
    finished_at = MillisecondsField(_("finished"), null=True, blank=True)
    expected = models.IntegerField(_("matching jobs"), default=0)
    looked_at = models.IntegerField(_("scanned"), default=0)
    done = models.IntegerField(_("done"), default=0)
    refused = models.JSONField(
        _("skipped"), default=dict, blank=True, help_text=_("Number of jobs by reason.")
    )
    place = models.JSONField(
        default=dict, blank=True, editable=False, help_text="Position of the next batch."
    )
    error = models.TextField(_("error"), blank=True, default="")
    holder = models.CharField(max_length=NAME_LENGTH, blank=True, default="", editable=False)
    held_until = MillisecondsField(default=0, editable=False)

    class Meta:
        db_table = "djqueue_bulk_operation"
        verbose_name = _("bulk operation")
        verbose_name_plural = _("bulk operations")
        default_permissions = ()
        indexes = (
            models.Index(
                fields=["id"], name="djqueue_bulk_open", condition=Q(state__in=("planned", "running"))
            ),
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.pk}"


class Dashboard(models.Model):
    """The permissions of the dashboard, in a model without a table."""

    class Meta:
        managed = False
        verbose_name = _("dashboard")
        verbose_name_plural = _("dashboard")
        default_permissions = ()
        permissions = (
            ("view_dashboard", "Can view the dashboard"),
            ("view_payload", "Can reveal hidden values of payloads and results"),
            ("view_storage", "Can view the storage page"),
            ("enqueue_job", "Can enqueue jobs"),
            ("retry_job", "Can retry failed jobs"),
            ("cancel_job", "Can cancel jobs"),
            ("delete_job", "Can delete jobs"),
            ("edit_job", "Can edit the arguments, time and priority of jobs"),
            ("pause_queue", "Can pause and resume queues and concurrency keys"),
            ("configure_queue", "Can set limits of queues, concurrency keys and limiters"),
            ("clear_queue", "Can clear, clean and obliterate queues"),
            ("manage_dlq", "Can retry and delete dead letters in bulk"),
            ("manage_cron", "Can add, change, run and delete schedules"),
            ("control_worker", "Can quiet, stop and inspect workers"),
            ("save_view", "Can save views of jobs"),
            ("share_view", "Can share saved views, and delete shared ones"),
        )

    def __str__(self) -> str:
        return "dashboard"
