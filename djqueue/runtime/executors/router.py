"""The executor of each job: chosen by its job type, then its queue, then the settings."""

from djqueue.client import registry
from djqueue.conf import Settings
from djqueue.core.errors import ConfigurationError, UnrecoverableError
from djqueue.core.executors import DEGRADE, INLINE, SUBPROCESS
from djqueue.core.job import Outcome
from djqueue.core.workers import ProcessInfo
from djqueue.runtime.context import WorkerContext
from djqueue.runtime.handlers import Handler, PermissionGroup, Style
from djqueue.runtime.outcomes import refusal
from djqueue.runtime.reports import Reports
from djqueue.runtime.runs import Run, Stop

from .inline import InlineExecutor
from .processes import kernel
from .processes.executor import ProcessExecutor
from .processes.frames import SAFE_CONTENT
from .processes.sandboxplan import plan_for
from .sandbox import SandboxUnavailableError
from .sandbox.apply import enforceable

MAX_LISTED = 20
"""Maximum of processes in a worker's entry."""


def chosen_executor(handler: Handler, queue: str, settings: Settings) -> str:
    """Return the executor of a handler's jobs in a queue."""
    return handler.executor or settings.policy(queue).executor or settings.executor


def handlers_for_processes(handlers: dict[str, Handler], settings: Settings) -> list[Handler]:
    """Return the handlers whose jobs may run in processes of their own.

    Raises ConfigurationError for a handler that would have to and cannot.
    """
    by_queue = [policy.executor for policy in settings.queues.values()]
    fit = []
    for handler in handlers.values():
        choices = {handler.executor} if handler.executor else {*by_queue, settings.executor}
        if choices <= {None, INLINE}:
            continue
        reason = _unfit(handler)
        if reason is None:
            fit.append(handler)
        elif handler.executor or settings.executor != INLINE:
            raise ConfigurationError(
                f"job {handler.name!r} cannot run in a process of its own: {reason}. Set "
                "executor='inline' for it"
            )
    for handler in fit:
        _check_permissions(handler, settings)
    if fit and (reason := kernel.missing()) is not None:
        raise ConfigurationError(
            f"job {fit[0].name!r} cannot run in a process of its own: {reason}. Set the executor 'inline'"
        )
    return fit


class ExecutorRouter:
    """Hands each run to the executor that is chosen for it."""

    def __init__(self, context: WorkerContext, reports: Reports, all_handlers: list[Handler]) -> None:
        self._settings = context.settings
        self._runs = context.runs
        self._wake_event = context.wake_event
        self._inline = InlineExecutor(context)
        self.groups: dict[PermissionGroup | None, ProcessExecutor] = {}
        """Executors of processes, by what their jobs are permitted; None for everything."""
        self._fit: dict[str, ProcessExecutor] = {}
        for group, handlers in _grouped(all_handlers).items():
            plan = None if group is None else plan_for(*group)
            executor = self.groups[group] = ProcessExecutor(context, reports, handlers, plan)
            self._fit.update(dict.fromkeys((handler.name for handler in handlers), executor))

    def start(self, run: Run) -> None:
        """Start a run."""
        chosen = chosen_executor(run.handler, run.claimed.queue, self._settings)
        if chosen == INLINE:
            self._inline.start(run)
            return
        content_type = run.claimed.options.content_type
        if run.claimed.name not in self._fit:
            self._refuse(run, f"the queue runs jobs {chosen}, which this function does not support")
        elif content_type not in SAFE_CONTENT:
            self._refuse(run, f"a job whose result is {content_type} cannot run {chosen}")
        else:
            run.in_process = True
            self._fit[run.claimed.name].start(run, fresh=chosen == SUBPROCESS)

    def stop(self, run: Run, reason: Stop) -> None:
        """Ask a run to stop. From any thread, also before it is started."""
        executor = self._fit.get(run.claimed.name)
        chosen = chosen_executor(run.handler, run.claimed.queue, self._settings)
        if executor is not None and chosen != INLINE:
            executor.stop(run, reason)
        else:
            self._inline.stop(run, reason)

    def release_waiting(self) -> None:
        """Return jobs that have been claimed, and whose handlers have not been called, to their queues."""
        self._inline.release_waiting()
        for executor in self.groups.values():
            executor.release_waiting()

    def kill(self) -> None:
        """Kill the processes whose jobs have not stopped."""
        for executor in self.groups.values():
            executor.kill()

    def give_up(self, run: Run) -> Outcome:
        """Return the outcome of a run that has not stopped in time."""
        return self._inline.give_up(run)

    def process_infos(self) -> tuple[ProcessInfo, ...]:
        """Describe some of the processes of jobs, those with a job first. From any thread."""
        processes = [process for executor in self.groups.values() for process in executor.processes]
        processes.sort(key=lambda process: process.run is None)
        return tuple(process.info() for process in processes[:MAX_LISTED])

    def close(self) -> None:
        """Release threads, connections and processes."""
        for executor in self.groups.values():
            executor.close()
        self._inline.close()

    def _refuse(self, run: Run, why: str) -> None:
        error = UnrecoverableError(why)
        run.error = error
        if self._runs.settle(run, refusal(run.claimed, error, error.reason)):
            self._wake_event.run_ended_here()


def _unfit(handler: Handler) -> str | None:
    if handler.batch is not None:
        return "its function takes batches"
    if handler.style is not Style.ARGUMENTS:
        return "only @job functions can"
    registered = registry.find(handler.name)
    if registered is None or registered.function is not handler.function:
        return "it is served under a name that is not its own"
    if handler.function.__module__ == "__main__":
        return "its function is defined in the program itself, which processes cannot import"
    return None


def _check_permissions(handler: Handler, settings: Settings) -> None:
    """Raise an error if this system cannot enforce the permissions of a handler."""
    if handler.permissions is None:
        return
    permissions, unenforced = handler.permissions
    try:
        enforceable(permissions, unenforced if settings.sandbox == DEGRADE else ())
    except SandboxUnavailableError as error:
        raise SandboxUnavailableError(
            f"job {handler.name!r} cannot run here: {error}. To run it without this guarantee, set "
            "DJQUEUE['SANDBOX'] = 'degrade', and allow_unenforced on the job"
        ) from error
    try:
        plan_for(permissions, unenforced)
    except ConfigurationError as error:
        raise ConfigurationError(f"job {handler.name!r}: {error}") from error


def _grouped(handlers: list[Handler]) -> dict[PermissionGroup | None, list[Handler]]:
    groups: dict[PermissionGroup | None, list[Handler]] = {}
    for handler in handlers:
        groups.setdefault(handler.permissions, []).append(handler)
    return groups
