"""Compare a scheduler with one that is loaded from its tables."""

from typing import Any

from djqueue.core.engine import Engine
from djqueue.core.engine.metricstore import MetricStore
from djqueue.core.engine.persistence import all_jobs
from djqueue.core.engine.queue import JobQueue
from djqueue.core.enginejob import EngineJob
from djqueue.core.job import JobRecord
from djqueue.core.states import State
from djqueue.storage.enginesnapshots import changed_limiters, settings_of
from djqueue.storage.scheduler import SchedulerStorage
from djqueue.storage.scheduler.journal import TableJournal
from djqueue.storage.scheduler.recovery import recover
from djqueue.storage.tables.rows import TEXT_LIMIT, clean
from djqueue.testing import contract


class NoJournal(TableJournal):
    """A journal that notes nothing."""

    def __init__(self) -> None:
        pass

    def changed(self, job: EngineJob) -> None:
        pass

    def restarted(self, job: EngineJob) -> None:
        pass


def check_recovery(storage: SchedulerStorage, **options: Any) -> None:
    """Assert that an engine that is loaded from the tables has the jobs of the scheduler's."""
    scheduler = storage.scheduler
    assert scheduler is not None
    scheduler.journal.wait()
    engine = Engine(clock=storage.clock, policies=contract.POLICIES, metrics=MetricStore())
    recover(storage.alias, engine, NoJournal(), lambda process: True)
    now = storage.clock.now()
    loaded, expected = described(engine, now), described(scheduler.engine, now)
    for part, value in expected.items():
        differences = {key: (value.get(key), loaded[part].get(key)) for key in value | loaded[part]}
        differences = {key: _unlike(*pair) for key, pair in differences.items() if pair[0] != pair[1]}
        assert not differences, f"{part}: {differences}"


def _unlike(one: Any, other: Any) -> Any:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return [pair for pair in zip(one, other, strict=True) if pair[0] != pair[1]]
    return one, other


def described(engine: Engine, now: int) -> dict[str, Any]:
    context = engine.context
    queues = {name: context.shard(name).find(name) for name in context.queue_names()}
    return {
        "jobs": {(job.queue, job.id): _job(queues[job.queue], job, now) for job in all_jobs(context)},
        "letters": {name: queue.dead.letters() for name, queue in queues.items()},
        "settings": {name: settings_of(queue) for name, queue in queues.items()},
        "limiters": {one.name: one for one in changed_limiters(context)},
        "waiting": {name: _waiting(queue) for name, queue in queues.items()},
    }


def _job(queue: JobQueue, job: EngineJob, now: int) -> tuple[Any, ...]:
    record: JobRecord = job.record()
    if job.state is State.DELAYED and job.run_at <= now:
        record = record._replace(state=State.WAITING)
    error = record.error
    if error is not None:
        error = error._replace(
            type=clean(error.type, TEXT_LIMIT), message=clean(error.message), traceback=clean(error.traceback)
        )
    items = None if job.stream is None or not job.stream.count else (job.stream.count, job.stream.items)
    return (
        *record._replace(error=error, logs=tuple((at, clean(line)) for at, line in record.logs)),
        items,
        job.unmet,
        job.token,
        0 if job.state is State.ACTIVE else job.last_token,
        job.cancel_requested and job.state is State.ACTIVE,
        queue.dead.retries_of(job.id),
    )


def _waiting(queue: JobQueue) -> int:
    return queue.waiting + queue.delayed.size
