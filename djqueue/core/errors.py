"""Every error of the package, in one tree.

    DjqueueError
    ├── ConfigurationError              a setting is wrong
    ├── OptionError (ValueError)        a job option is wrong
    ├── ArgumentsError (TypeError)      a job's function does not accept the arguments
    ├── UnknownQueueError               the settings close the list of queues
    ├── UnknownJobError                 no handler has this name here
    ├── JobNameError                    a function cannot be registered under its name
    ├── WaitInTransactionError          the job starts only after the commit
    ├── SerializationError              a value cannot become bytes, or bytes a value
    │   └── PayloadTooLargeError
    ├── StorageError                    the storage refused or failed
    │   ├── StorageUnavailableError     ... because it cannot be reached
    │   ├── JobNotStoredError           ... because its database refuses the rows of a job
    │   ├── StorageReplacedError        ... because the file of its database was removed or replaced
    │   ├── SchedulerRunningError       ... because another process is the scheduler
    │   ├── SnapshotTargetError         ... because a snapshot cannot be written to it now
    │   ├── RestoreInProgressError      ... because a snapshot is being written to it
    │   └── QueueFullError              ... because the queue is at its capacity
    ├── BackupError                     a backup cannot be taken or restored
    │   ├── BackupNotFoundError         ... because there is none of this name
    │   └── BackupDamagedError          ... because its files are not as they were written
    ├── JobError                        an operation on a job failed
    │   ├── JobNotFoundError
    │   ├── JobCancelledError
    │   ├── ResultTimeoutError (TimeoutError)   a caller's wait is over; the job continues
    │   ├── JobTimeoutError (TimeoutError)      the job exceeded its timeout or its ttl
    │   ├── WorkerCrashedError          ... because its process died
    │   ├── JobLimitError               ... because it exceeded a limit of its process
    │   │   └── JobMemoryLimitError (MemoryError)
    │   ├── StreamRestartedError
    │   └── JobFailedError
    │       └── MaxRetriesError
    └── ControlFlow                     raised by handlers on purpose
        ├── Retry                       again, after a delay; counts as a failure
        ├── Snooze                      again, after a delay; does not count
        ├── Discard                     cancelled: no dead letter
        └── UnrecoverableError          failed at once, without further attempts
            └── ItemError               ... because a yielded item cannot be sent

A class's docstring is its message; a subclass without a docstring has its base's. `code` is shared with
stored rows and with what goes over sockets.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

from .messages import without_credentials


class DjqueueError(Exception):
    """djqueue could not do what was asked."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or _described(type(self)))


class ConfigurationError(DjqueueError):
    """A djqueue setting is wrong."""

    code = "configuration"

    def __init__(self, message: str | None = None) -> None:
        super().__init__(None if message is None else without_credentials(message))


class OptionError(DjqueueError, ValueError):
    """A job option is wrong."""

    code = "option"


class ArgumentsError(DjqueueError, TypeError):
    """The job's function does not accept these arguments."""

    code = "arguments"


class UnknownQueueError(DjqueueError):
    """STRICT_QUEUES is on, and the queue is not in DJQUEUE['QUEUES']."""

    code = "unknown_queue"


class UnknownJobError(DjqueueError):
    """No handler is registered for this job name."""

    code = "unknown_job"


class JobNameError(DjqueueError):
    """The function cannot be registered under this job name."""

    code = "job_name"


class WaitInTransactionError(DjqueueError):
    """A transaction cannot wait for a job that it enqueues: the job starts only after the commit."""

    code = "wait_in_transaction"


class SerializationError(DjqueueError):
    """A value cannot be encoded, or data cannot be decoded."""

    code = "serialization"


class PayloadTooLargeError(SerializationError):
    """A payload is larger than the settings allow."""

    code = "payload_too_large"


class StorageError(DjqueueError):
    """The storage refused or failed."""

    code = "storage"


class StorageUnavailableError(StorageError):
    """The storage cannot be reached."""

    code = "storage_unavailable"
    remedy = ""
    """Last sentence of the message, which says what to do, if it is known."""


class JobNotStoredError(StorageError):
    """The database refuses the rows of a job, which is only in the scheduler's memory."""

    code = "job_not_stored"

    def __init__(self, message: str | None = None, jobs: Mapping[int, tuple[str, str]] | None = None) -> None:
        super().__init__(message)
        self.jobs = jobs or {}
        """Queue and id of each of the jobs, by its position among those of the call, for a caller in the
        scheduler's process."""


class StorageReplacedError(StorageError):
    """The file of the database was removed or replaced while this process had it open."""

    code = "storage_replaced"


class SchedulerRunningError(StorageError):
    """Another process is the scheduler of this database."""

    code = "scheduler_running"


class SnapshotTargetError(StorageError):
    """A snapshot can only be written to an empty storage without workers and scheduler."""

    code = "snapshot_target"


class RestoreInProgressError(StorageError):
    """A snapshot is being written to the storage: wait until that ends; if it was interrupted, repeat it."""

    code = "restore_in_progress"


class QueueFullError(StorageError):
    """The queue is full: it has reached its MAX_SIZE."""

    code = "queue_full"


class BackupError(DjqueueError):
    """The backup cannot be taken, read or restored."""

    code = "backup"


class BackupNotFoundError(BackupError):
    """There is no backup of this name."""

    code = "backup_not_found"


class BackupDamagedError(BackupError):
    """The files of the backup are not as they were written."""

    code = "backup_damaged"


class JobError(DjqueueError):
    """An operation on a job failed."""

    code = "job"

    def __init__(self, message: str | None = None, *, job_id: str = "") -> None:
        super().__init__(message)
        self.job_id = job_id


class JobNotFoundError(JobError):
    """The job does not exist, or its record has expired."""

    code = "job_not_found"


class JobCancelledError(JobError):
    """The job was cancelled."""

    code = "job_cancelled"


class ResultTimeoutError(JobError, TimeoutError):
    """The job did not end while the caller waited, and continues."""

    code = "result_timeout"


class JobTimeoutError(JobError, TimeoutError):
    """The job ran longer than its timeout, or did not start within its ttl."""

    code = "job_timeout"


class WorkerCrashedError(JobError):
    """The process that ran the job died."""

    code = "worker_crashed"


class JobLimitError(JobError):
    """The job exceeded a limit of its process, such as its processor time."""

    code = "job_limit"


class JobMemoryLimitError(JobLimitError, MemoryError):
    """The job used more memory than its limit."""

    code = "job_memory_limit"


class JobInterrupted(BaseException):
    """Raised in a job that runs in a process of its own, and has not stopped after it was asked to.

    Handlers may clean up, and should not continue: the process is killed soon.
    """


class StreamRestartedError(JobError):
    """The job was restarted, so the items of its previous attempt are no longer valid."""

    code = "stream_restarted"


class JobFailedError(JobError):
    """The job failed.

    `reason` is the dead letter's; `error_type`, `error_message` and `traceback` are those of the
    exception that the handler raised last.
    """

    code = "job_failed"

    def __init__(
        self,
        message: str | None = None,
        *,
        job_id: str = "",
        reason: str = "",
        error_type: str = "",
        error_message: str = "",
        traceback: str = "",
        payload: Any = None,
    ) -> None:
        super().__init__(message, job_id=job_id)
        self.reason = reason
        self.error_type = error_type
        self.error_message = error_message
        self.traceback = traceback
        self.payload = payload


class MaxRetriesError(JobFailedError):
    """The job failed on its last allowed attempt. `payload` is the job's payload."""

    code = "max_retries"


class ControlFlow(DjqueueError):
    """Raised by a handler to control the outcome of its job."""

    code = "control_flow"


class _Again(ControlFlow):
    def __init__(
        self, message: str | None = None, *, delay: float | timedelta | None = None, **unknown: object
    ) -> None:
        name = type(self).__name__
        if isinstance(message, (int, float, timedelta)):
            raise TypeError(f"{name}({message!r}): pass a delay by its name: {name}(delay={message!r})")
        if unknown:
            raise TypeError(f"{name}() has no {min(unknown)!r}; pass delay=, in seconds or as a timedelta")
        if isinstance(delay, bool) or not isinstance(delay, (int, float, timedelta, type(None))):
            raise TypeError(f"{name}(): delay: expected seconds or a timedelta, got {delay!r:.100}")
        super().__init__(message)
        self.delay = delay


class Retry(_Again):
    """The handler asked for another attempt; this one counts as a failure.

    `delay`, in seconds or as a timedelta, replaces the job's backoff.
    """

    code = "retry"


class Snooze(_Again):
    """The handler snoozed the job; this run counts neither as an attempt nor as a failure."""

    code = "snooze"


class Discard(ControlFlow):
    """The handler discarded the job, which ends as cancelled."""

    code = "discard"


class UnrecoverableError(ControlFlow):
    """The job cannot succeed, and fails at once without further attempts."""

    code = "unrecoverable"
    reason = "explicit_fail"
    """Reason of the job's dead letter."""


class ItemError(UnrecoverableError):
    """A generator yielded an item that cannot be sent: its payload is invalid, or a limit was exceeded."""

    code = "item"
    reason = "invalid_result"


def _described(kind: type[DjqueueError]) -> str:
    """Return the first line of the docstring of a class, or of its bases; its name if Python has none."""
    documented = (base.__doc__ or "" for base in kind.__mro__ if issubclass(base, DjqueueError))
    lines = (text.strip().partition("\n")[0] for text in documented)
    return next(filter(None, lines), kind.__name__)


def by_code(code: str, message: str) -> DjqueueError:
    """Return the error that a code names, as received from another process."""
    return _BY_CODE.get(code, DjqueueError)(message)


def _tree(root: type[DjqueueError]) -> list[type[DjqueueError]]:
    return [root, *(leaf for branch in root.__subclasses__() for leaf in _tree(branch))]


_BY_CODE = {error.__dict__["code"]: error for error in _tree(DjqueueError) if "code" in error.__dict__}
