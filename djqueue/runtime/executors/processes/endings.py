"""The error of a job whose process has ended without an outcome."""

import os
import signal

from djqueue.core.errors import JobError, JobMemoryLimitError, JobTimeoutError, WorkerCrashedError

from .jobprocess import JobProcess


def ending(process: JobProcess) -> tuple[JobError, str]:
    """Return the error of the process's job, and the reason of its dead letter."""
    limits, killed = process.limits, process.killed_for
    if killed == "memory" and limits.memory is not None:
        used, limit = (f"{size / 2**20:,.0f} MiB" for size in (process.peak, limits.memory))
        return JobMemoryLimitError(f"used {used} of memory; its limit is {limit}"), "memory_limit"
    if killed == "cpu" and limits.cpu is not None:
        seconds = limits.cpu / 1_000
        return JobTimeoutError(f"used more than its limit of {seconds:g} s of processor time"), "timeout"
    if killed.startswith("storage"):
        text = f"its process could not read from the storage ({killed[9:]})"
    elif killed.startswith("violation"):
        text = f"its process broke the protocol and was killed: {killed[11:]}"
    elif killed:
        text = "its process did not stop in time and was killed"
    else:
        text = f"its process {_described(process.status)}"
    return WorkerCrashedError(text), "worker_crashed"


def _described(status: int) -> str:
    """Return how a process ended, from a status of `waitpid`, as the end of a sentence."""
    if status < 0:
        return "ended together with the template process that it was forked from"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        ran_out = "; the system may have run out of memory" if number == signal.SIGKILL else ""
        return f"was killed by {name}{ran_out}"
    return f"ended with exit code {os.waitstatus_to_exitcode(status)} before the job had ended"
