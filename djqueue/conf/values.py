"""The values of the `DJQUEUE` setting, with their defaults."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from djqueue.core.executors import INLINE, REQUIRE
from djqueue.core.messages import HiddenOptions
from djqueue.core.metrics import DEFAULT_TIERS, Tiers
from djqueue.core.options import MSGPACK, EnqueueOptions
from djqueue.core.policies import LimiterPolicy, QueuePolicy

ALERT_RULES = ("new_error", "late", "no_worker", "missed_schedule", "lost_worker")
"""Kinds of problems that can be announced."""
DEFAULT_POLICY = QueuePolicy()
IN_MEMORY, REAL = "memory", "real"
"""Storages of the project's tests."""


@dataclass(frozen=True, kw_only=True)
class DashboardSettings:
    """The values of `settings.DJQUEUE["DASHBOARD"]`."""

    read_only: bool = False
    """Whether the dashboard allows no changes, whatever the permissions of the user."""
    queue_filter: str | Callable[..., bool] | None = None
    """A function (request, queue name) -> whether the user may see the queue; or its dotted path."""
    admin_lists: bool = False
    """Whether the admin's index and sidebar link to the lists of djqueue's tables."""
    poll: int = 5_000
    """Default milliseconds between refreshes of an open page; 0 for none."""
    sse: bool = False
    """Whether open pages receive changes as server-sent events, under ASGI, instead of polling."""
    redact: tuple[str, ...] = (
        "authorization",
        "card",
        "cookie",
        "credential",
        "cvv",
        "email",
        "iban",
        "password",
        "phone",
        "secret",
        "session",
        "ssn",
        "token",
        "*key",
    )
    """Words in the names of values that are hidden until revealed; `*word` matches the end of a name."""


@dataclass(frozen=True, kw_only=True)
class HealthSettings:
    """The values of `settings.DJQUEUE["HEALTH"]`."""

    max_wait: int = 60_000
    """Milliseconds that a job may be due before it counts as not being claimed."""
    lease_grace: int = 15_000
    """Milliseconds after which an expired lease counts as stale."""
    timeout: int = 2_000
    """Milliseconds that all checks together may take."""


@dataclass(frozen=True, kw_only=True)
class BackupSettings:
    """The values of `settings.DJQUEUE["BACKUP"]`."""

    every: int | None = 6 * 3_600_000
    """Milliseconds between two backups that `runworkers` takes; None for none."""
    is_every_given: bool = False
    """Whether the project has set `every`. Jobs in the memory of one process are backed up only then."""
    keep: int = 12
    """Number of backups kept: the newest."""
    folder: str | None = None
    """Folder of the backups if STORAGES has no `djqueue_backups`; None for `djqueue_backups` in BASE_DIR."""
    timeout: int = 3_600_000
    """Milliseconds after which a backup is given up."""


@dataclass(frozen=True, kw_only=True)
class MonitoringSettings:
    """The values of `settings.DJQUEUE["MONITORING"]`: who may read the URLs for monitoring systems."""

    token: str | None = field(default=None, repr=False)
    """The token that clients send."""
    token_file: str | None = None
    """Path of a file with the token, read at every request."""
    public: bool = False
    """Whether the URLs need no token."""


@dataclass(frozen=True, kw_only=True)
class AlertSettings:
    """The values of `settings.DJQUEUE["ALERTS"]`: who gets a message when problems begin and end."""

    mail: tuple[str, ...] = ()
    """Addresses that get a mail."""
    webhook: str | None = field(default=None, repr=False)
    """URL that gets a JSON document. It may be a secret."""
    rules: tuple[str, ...] = ALERT_RULES
    """Kinds of problems that are announced."""
    after: int = 60_000
    """Milliseconds for which a problem must last before it is announced."""


@dataclass(frozen=True, kw_only=True)
class SettingsInTests:
    """The values of `settings.DJQUEUE["TEST"]`."""

    storage: str = IN_MEMORY
    """Storage of the project's tests: `memory`, or `real` for the one that STORAGE names."""
    prefix: str | None = None
    """Prefix of a real storage's keys, after its own; None for one of each test process."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Settings:
    """The values of `settings.DJQUEUE`, converted."""

    backend: str = "djqueue.storage.database.DatabaseStorage"
    """Dotted path of the storage class."""
    storage_options: Mapping[str, Any] = field(default_factory=HiddenOptions)
    """Keyword arguments of the storage. Their repr omits the values, which may be passwords."""
    immediate: bool = False
    """Whether jobs run when they are enqueued, without a worker, in memory instead of in the storage."""
    queues: Mapping[str, QueuePolicy] = field(default_factory=dict)
    limiters: Mapping[str, LimiterPolicy] = field(default_factory=dict)
    """Limits shared by queues, by the name in LIMITER of a queue."""
    strict_queues: bool = False
    """Whether only the queues in QUEUES exist."""
    defaults: EnqueueOptions = field(default_factory=EnqueueOptions)
    """Default options of a job, overridden by its job type and its caller."""
    enqueue_on_commit: bool | str = False
    """Default of the job option of this name."""
    max_payload: int = 1024 * 1024
    """Maximum bytes of an encoded payload or result."""
    max_items: int = 10_000
    """Maximum items sent by one attempt of a generator."""
    max_items_size: int = 16 * 1024 * 1024
    """Maximum bytes of the items of one attempt."""
    accept_content: frozenset[str] = frozenset({MSGPACK, "application/json"})
    """Accepted content types of payloads and results."""
    codec: str = MSGPACK
    """Default content type of jobs."""
    concurrency: int = 10
    """Default number of slots of a worker."""
    shutdown_timeout: int = 25_000
    """Milliseconds that a stopping worker waits for its jobs."""
    heartbeat: int = 5_000
    """Milliseconds between the heartbeats of a worker, which renew its leases."""
    stuck_timeout: int = 60_000
    """Milliseconds for which the leases of a stuck worker are renewed for it, and after which it is killed;
    0 for never."""

    metrics: Tiers = DEFAULT_TIERS
    """Retention of metrics buckets."""

    version: str = ""
    """Version of the project, reported by its workers. Charts annotate the start of each version."""

    modules: tuple[str, ...] = ()
    """Modules that define jobs, besides `jobs`: names to import from every app, or dotted paths."""

    executor: str = INLINE
    """Executor of jobs whose job type and queue name none."""
    sandbox: str = REQUIRE
    """Behavior where the system cannot enforce the permissions of a job: one of `executors.SANDBOXES`."""
    sandbox_imports: tuple[str, ...] = ()
    """Files and directories that modules of jobs with permissions may read while they are imported."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Default limits of jobs in processes of their own, as fields of `JobLimits`."""

    middleware: tuple[str, ...] = ()
    """Dotted paths of the middleware classes, outermost first."""
    dashboard: DashboardSettings = field(default_factory=DashboardSettings)
    health: HealthSettings = field(default_factory=HealthSettings)
    backup: BackupSettings = field(default_factory=BackupSettings)
    monitoring: MonitoringSettings = field(default_factory=MonitoringSettings)
    alerts: AlertSettings = field(default_factory=AlertSettings)
    test: SettingsInTests = field(default_factory=SettingsInTests)

    def policy(self, queue: str) -> QueuePolicy:
        """Return the configuration of a queue."""
        return self.queues.get(queue, DEFAULT_POLICY)
