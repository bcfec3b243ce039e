"""Django signals for the events of jobs, sent in the process in which they happen.

| signal | sent when | arguments besides `queue`, `job_id`, `name` |
|---|---|---|
| `job_enqueued` | a storage has accepted a new job; in a transaction, after the commit | `options` |
| `job_started` | a worker has called the handler of a job | `attempt`, `worker` |
| `job_completed` | a job has completed | `attempt`, `worker`, `duration` |
| `job_retried` | an attempt has failed and another will follow | `attempt`, `worker`, `error`, `delay` |
| `job_failed` | a job has failed for good, for any reason | `attempt`, `worker`, `reason`, `error` |
| `job_cancelled` | a job has been cancelled | `reason` |
| `job_stalled` | the lease of an attempt expired, because its worker died or was cut off | |
| `schedule_fired` | a schedule has enqueued a job | `schedule` |

The sender is the job type made by `@job`, or None if this process has no job type of that name. `duration`
and `delay` are in seconds, `error` is a `djqueue.core.job.JobFailure` or None, and `schedule` is a name. The
`attempt` of `job_failed` is 0 and its `worker` is empty if no worker reported it: the job expired, stalled
too often, or a dependency failed.

An exception in a receiver is logged and affects neither the job nor other receivers. A process sends signals
only for what it does itself, and a process that dies may not send the last ones. Without receivers, signals
cost nothing.
"""

from django.dispatch import Signal

job_enqueued = Signal()
job_started = Signal()
job_completed = Signal()
job_retried = Signal()
job_failed = Signal()
job_cancelled = Signal()
job_stalled = Signal()
schedule_fired = Signal()

problem = Signal()
"""Sent when problems of a storage begin, and when they are over: see the setting ALERTS. Arguments: `id`,
`text`, `hint`, `is_over` and `objects`, a tuple of `djqueue.core.overview.Evidence`."""

dashboard_action = Signal()
"""Sent for each action in the dashboard, performed or refused. Argument: `event`, its `AuditEvent`."""

ALL = {
    "job_enqueued": job_enqueued,
    "job_started": job_started,
    "job_completed": job_completed,
    "job_retried": job_retried,
    "job_failed": job_failed,
    "job_cancelled": job_cancelled,
    "job_stalled": job_stalled,
    "schedule_fired": schedule_fired,
}
"""Signals of jobs by name."""
