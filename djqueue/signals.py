"""Django signals: what happens to jobs, for receivers in the process in which it happened.

| signal | when | beside `queue`, `job_id`, `name` |
|---|---|---|
| `job_enqueued` | a storage has accepted a new job; in a transaction: after its commit | `options` |
| `job_started` | a worker has handed a job to its handler | `attempt`, `worker` |
| `job_completed` | a job has completed | `attempt`, `worker`, `duration` |
| `job_failed` | a run has failed, the last one or not | `attempt`, `worker`, `error` |
| `job_retrying` | ... and another one will follow | `attempt`, `worker`, `error`, `delay` |
| `job_dead` | a job has become a dead letter, however | `reason`, `error` |
| `job_cancelled` | a job has ended as cancelled | `reason` |
| `job_stalled` | a run was lost with its worker | |
| `schedule_fired` | a schedule has enqueued a job | `schedule` |

The sender is the job type under `@job`, or None where this process has none of the name. `duration` and
`delay` are seconds, `error` is a `djqueue.core.job.JobFailure` or None, `schedule` a name.

A receiver that raises is logged, and concerns neither the job nor other receivers. Signals tell a process
what it has done itself: one that dies in that moment tells nobody. They cost nothing without receivers.
"""

from django.dispatch import Signal

job_enqueued = Signal()
job_started = Signal()
job_completed = Signal()
job_failed = Signal()
job_retrying = Signal()
job_dead = Signal()
job_cancelled = Signal()
job_stalled = Signal()
schedule_fired = Signal()

dashboard_action = Signal()
"""Somebody did something in the dashboard, or was refused: `event`, the `AuditEvent` that was kept of it."""

ALL = {
    "job_enqueued": job_enqueued,
    "job_started": job_started,
    "job_completed": job_completed,
    "job_failed": job_failed,
    "job_retrying": job_retrying,
    "job_dead": job_dead,
    "job_cancelled": job_cancelled,
    "job_stalled": job_stalled,
    "schedule_fired": schedule_fired,
}
"""The signals of jobs by name."""
