"""Workers, leader leases, and backups."""

from django.db import models
from django.utils.translation import gettext_lazy as _

from djqueue.fields import NAME_LENGTH, MillisecondsField


class WorkerState(models.Model):
    """The latest report of a worker."""

    worker_id = models.CharField(_("worker ID"), max_length=NAME_LENGTH, unique=True)
    host = models.CharField(_("host"), max_length=NAME_LENGTH)
    pid = models.IntegerField(_("process ID"))
    queues = models.JSONField(_("queues"), null=True, blank=True)
    names = models.JSONField(_("job names"), default=list)
    concurrency = models.IntegerField(_("slots"))
    started_at = MillisecondsField(_("started"))
    seen_at = MillisecondsField(_("last heartbeat"))
    active = models.IntegerField(_("active jobs"), default=0)
    state = models.CharField(_("state"), max_length=16)
    about = models.JSONField(
        _("details"),
        null=True,
        blank=True,
        help_text=_("Kind, heartbeat, memory, versions and active jobs."),
    )
    # Machine, boot, PID namespace and start of its process, if the process itself has written the row.
    process = models.CharField(max_length=NAME_LENGTH, default="", db_default="")
    # Commands that wait for it, separated by commas, and the stacks of its threads and tasks.
    commands = models.CharField(max_length=64, default="", db_default="")
    dump = models.TextField(default="", db_default="")
    dumped_at = models.BigIntegerField(null=True)

    class Meta:
        db_table = "djqueue_worker_state"
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        default_permissions = ()

    def __str__(self) -> str:
        return self.worker_id


class LeaderLeaseRow(models.Model):
    """The process that does some work alone, such as sweeps, the mirror or a backup: see `LeaderLease`."""

    name = models.CharField(max_length=32, primary_key=True)
    holder = models.CharField(max_length=NAME_LENGTH)
    host = models.CharField(max_length=NAME_LENGTH)
    pid = models.IntegerField()
    address = models.CharField(max_length=NAME_LENGTH, help_text="Address of its socket.")
    generation = models.BigIntegerField(default=0, help_text="Incremented by each new holder.")
    renewed_at = MillisecondsField()
    expires_at = MillisecondsField()

    class Meta:
        db_table = "djqueue_leader_lease"
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.holder} at {self.address}"


class BackupState(models.Model):
    """The last attempt to take a backup; a single row."""

    host = models.CharField(max_length=NAME_LENGTH)
    pid = models.IntegerField()
    started_at = MillisecondsField()
    ended_at = MillisecondsField(null=True, help_text="Empty while it runs, or if its process was killed.")
    name = models.CharField(max_length=64, blank=True, default="", help_text="The backup; empty without one.")
    error = models.TextField(blank=True, default="")

    class Meta:
        db_table = "djqueue_backup_state"
        default_permissions = ()

    def __str__(self) -> str:
        return self.name or self.error
