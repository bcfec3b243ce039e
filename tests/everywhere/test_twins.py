"""Every client method that calls a storage has an async version with the same answer and effect."""

import asyncio
import importlib
import inspect
import pkgutil
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from djqueue import Limiter, Queue, Worker, chain, client, job
from djqueue.client.flows import FlowResult
from djqueue.client.info import JobInfo, JobStatus
from djqueue.core.job import DeadLetterRecord, Event
from djqueue.core.policies import Hold
from djqueue.storage.base import Storage
from djqueue.testing.factories import a_failed_job, an_active_job, enqueue
from djqueue.testing.factories import job as record_of
from tests.support import PATIENCE, eventually

ORDERS, OTHER = "orders", "other"
PAYLOADS = [{"n": 1}, {"n": 2}]

WITHOUT_STORAGE = {
    "Queue.node",
    "JobType.node",
    "JobType.schedule",
    "JobType.using",
}
"""Public methods that only prepare something for a later call."""
INSIDE = {
    "Announcer",
    "Arguments",
    "Declarations",
    "JobInfo",
    "DeadLetterFilter",
    "Node",
    "ProjectSchedules",
    "StreamPosition",
    "Registry",
    "StorageResultReader",
    "StoredResult",
    "Streaming",
    "BatchCollector",
    "LoopSignal",
    "Signal",
}
"""Public classes without a call for users that asks a storage: values, and what the client is made of."""
STREAMING = {
    "Queue.enqueue_and_stream",
    "Queue.stream",
    "JobType.enqueue_and_stream",
    "JobType.stream",
}
"""Calls that give iterators: `tests/client/test_streaming.py` tries them, and their twins."""

Case = Callable[[Storage, Queue], tuple[Any, tuple[Any, ...], dict[str, Any]]]


def with_jobs(*args: Any, **kwargs: Any) -> Case:
    """On a queue with a job in each state but completed."""

    def prepare(storage: Storage, queue: Queue) -> Any:
        an_active_job(storage, queue=ORDERS, id="active")
        a_failed_job(storage, queue=ORDERS, id="failed")
        enqueue(storage, queue=ORDERS, id="waiting", concurrency_key="g", payload=b"\x01")
        enqueue(storage, queue=ORDERS, id="delayed", delay=3_600_000)
        enqueue(storage, queue=ORDERS, id="blocked", depends_on=((ORDERS, "active"),))
        enqueue(storage, queue=ORDERS, id="gone")
        storage.jobs.cancel(ORDERS, ["gone"])
        return queue, args, kwargs

    return prepare


def on_empty(*args: Any, **kwargs: Any) -> Case:
    """On a queue without jobs."""
    return lambda storage, queue: (queue, args, kwargs)


def paused(storage: Storage, queue: Queue) -> Any:
    """On a queue in which nothing may start."""
    queue.pause()
    queue.pause_key("g")
    queue.set_key_limit("h", 2)
    return queue, (), {}


def held(storage: Storage, queue: Queue) -> Any:
    """On a queue that holds a job type."""
    queue.hold("mail", until=datetime(2100, 1, 1, tzinfo=UTC), reason="the provider is down")
    return queue, ("mail",), {}


def paused_group(storage: Storage, queue: Queue) -> Any:
    """For a group in which nothing may start."""
    paused(storage, queue)
    return queue, ("g",), {}


def a_job(*args: Any, **kwargs: Any) -> Case:
    """Of a job type."""

    def prepare(storage: Storage, queue: Queue) -> Any:
        @job(name="double", queue=ORDERS)
        def double(number: int) -> int:
            return number * 2

        return double.using(id="a"), args, kwargs

    return prepare


def a_flow(storage: Storage, queue: Queue) -> Any:
    """One after the other."""
    nodes = [queue.node(number, id=name) for number, name in enumerate("abc")]
    return chain(*nodes), (), {}


def a_limiter(**kwargs: Any) -> Case:
    """Of several queues."""
    return lambda storage, queue: (Limiter("stripe", storage=storage), (), kwargs)


def listening(storage: Storage, queue: Queue) -> Any:
    """To what happens to a job."""
    return queue, ("enqueued", HEARD.append), {}


HEARD: list[Event] = []
NEVER = datetime(1970, 1, 1, tzinfo=UTC)

CASES: dict[str, list[Case]] = {
    "Queue.enqueue": [on_empty({"n": 1}, id="a", priority=3), with_jobs(id="waiting"), with_jobs(id="gone")],
    "Queue.enqueue_many": [
        on_empty(PAYLOADS, ids=["a", "b"], delay=60),
        with_jobs([1, 2], ids=["x", "gone"]),
    ],
    "Queue.enqueue_and_wait": [on_empty({"n": 1}, id="a", wait=PATIENCE)],
    "Queue.get_job": [with_jobs("waiting"), with_jobs("failed"), with_jobs("nobody")],
    "Queue.get_status": [with_jobs("delayed"), with_jobs("nobody")],
    "Queue.get_states": [with_jobs(["waiting", "active", "nobody"])],
    "Queue.get_result": [with_jobs("waiting"), with_jobs("failed"), with_jobs("gone"), with_jobs("nobody")],
    "Queue.cancel": [with_jobs("waiting"), with_jobs("active"), with_jobs("failed"), with_jobs("nobody")],
    "Queue.promote": [with_jobs("delayed"), with_jobs("waiting")],
    "Queue.reschedule": [
        with_jobs("delayed", delay=0),
        with_jobs("waiting", delay=60),
        with_jobs("active", delay=1),
    ],
    "Queue.move": [with_jobs(["waiting", "active", "nobody"], OTHER), with_jobs("delayed", ORDERS)],
    "Queue.update": [with_jobs("waiting", payload={"n": 3}, priority=5), with_jobs("active", priority=1)],
    "Queue.retry": [with_jobs("failed"), with_jobs("waiting")],
    "Queue.remove": [with_jobs("failed"), with_jobs("active"), with_jobs("nobody")],
    "Queue.dead_letters": [with_jobs(), with_jobs(reason="ttl_expired"), with_jobs(limit=0)],
    "Queue.count_dead": [with_jobs(), with_jobs(name="nobody")],
    "Queue.move_dead": [with_jobs(OTHER), with_jobs(OTHER, dry_run=True, reason="ttl_expired")],
    "Queue.retry_dead": [with_jobs(), with_jobs(["failed", "waiting"], dry_run=True)],
    "Queue.counts": [with_jobs()],
    "Queue.pause": [on_empty()],
    "Queue.resume": [paused],
    "Queue.is_paused": [paused, on_empty()],
    "Queue.hold": [on_empty("mail", reason="the provider is down"), held],
    "Queue.release": [held, on_empty("mail")],
    "Queue.holds": [on_empty()],
    "Queue.set_limits": [on_empty(concurrency=2, rate="5/s")],
    "Queue.set_key_limit": [on_empty("g", 3)],
    "Queue.pause_key": [on_empty("g")],
    "Queue.resume_key": [paused_group],
    "Queue.key_limits": [paused],
    "Queue.clear": [with_jobs(), with_jobs(delayed=False)],
    "Queue.clean": [with_jobs(), with_jobs(0, ["failed"], 1)],
    "Queue.obliterate": [with_jobs(), with_jobs(force=True)],
    "Queue.on": [listening],
    "JobType.enqueue": [a_job(2)],
    "JobType.enqueue_many": [a_job([((1,), {}), ((2,), {})])],
    "JobType.enqueue_and_wait": [a_job(2, wait=PATIENCE)],
    "Flow.enqueue": [a_flow],
    "Limiter.set": [a_limiter(rate="5/s", concurrency=2), a_limiter(concurrency=0)],
    "Limiter.state": [a_limiter()],
}
"""By method: what it is called on, and with what."""
WAITING = {"Queue.enqueue_and_wait", "JobType.enqueue_and_wait"}


class Method(NamedTuple):
    """A public method of a class of the client."""

    owner: type
    name: str

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


def methods() -> Iterator[Method]:
    """Every public method of every public class of the client, twins left out."""
    for module in pkgutil.iter_modules(client.__path__, f"{client.__name__}."):
        found = importlib.import_module(module.name)
        for owner in vars(found).values():
            if inspect.isclass(owner) and owner.__module__ == module.name and is_callers(owner):
                for name, value in vars(owner).items():
                    if inspect.isfunction(value) and not name.startswith("_") and not is_twin(owner, name):
                        yield Method(Queue if issubclass(Queue, owner) else owner, name)


def is_callers(owner: type) -> bool:
    """Whether its methods may be calls of a user's."""
    return not (owner.__name__.startswith("_") or owner.__name__ in INSIDE or issubclass(owner, tuple))


def is_twin(owner: type, name: str) -> bool:
    return name.startswith("a") and name[1:] in vars(owner)


ASKING = [method for method in methods() if str(method) not in WITHOUT_STORAGE | STREAMING]


def test_every_method_that_calls_the_storage_has_a_case() -> None:
    assert {str(method) for method in ASKING} == set(CASES)


def test_every_method_that_calls_storage_has_async_twin() -> None:
    for method in ASKING:
        twin = getattr(method.owner, f"a{method.name}", None)
        assert inspect.iscoroutinefunction(twin), method
        assert signature(twin) == signature(getattr(method.owner, method.name)), method
        assert twin.__doc__ in (f"See `{method.name}`.", f"Async version of `{method.name}`."), method


def test_every_streaming_method_has_async_twin() -> None:
    for method in [one for one in methods() if str(one) in STREAMING]:
        twin = getattr(method.owner, f"a{method.name}")
        assert signature(twin) == signature(getattr(method.owner, method.name)), method
        assert twin.__doc__.startswith((f"See `{method.name}`", f"Async version of `{method.name}`")), method
        assert inspect.signature(twin).return_annotation.__origin__ is AsyncIterator, method


def signature(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def test_async_twin_has_same_answer_and_effect(storage: Storage) -> None:
    different = {}
    for name, cases in CASES.items():
        for number, case in enumerate(cases):
            by_call, by_twin = outcomes(storage, name, case)
            if by_call != by_twin:
                different[name, number] = by_call, by_twin

    assert different == {}


def outcomes(storage: Storage, name: str, case: Case) -> list[Any]:
    """Return the answer and the effect of a call, and of its twin."""
    verb = name.partition(".")[2]
    found = []
    for call in (at_once, of_a_coroutine):
        storage.queues.obliterate(ORDERS, force=True)
        storage.queues.obliterate(OTHER, force=True)
        del HEARD[:]
        thing, args, kwargs = case(storage, Queue(ORDERS))
        if name in WAITING:
            handlers = {ORDERS: lambda job: job.payload["n"] * 2, "double": double}
            with Worker(storage, [ORDERS], handlers=handlers):
                answer = call(thing, verb, *args, **kwargs)
        else:
            answer = call(thing, verb, *args, **kwargs)
        if name == "Queue.on":
            enqueue(storage, queue=ORDERS, id="heard")
            eventually(lambda: [event.id for event in HEARD] == ["heard"])
        found.append((plain(answer), everything(storage)))
    return found


def double(job: Any) -> Any:
    return job.payload["args"][0] * 2


def at_once(thing: Any, verb: str, *args: Any, **kwargs: Any) -> Any:
    """The call itself; what it raises is an answer, too."""
    try:
        return getattr(thing, verb)(*args, **kwargs)
    except Exception as error:
        return error


def of_a_coroutine(thing: Any, verb: str, *args: Any, **kwargs: Any) -> Any:
    """Its twin."""

    async def call() -> Any:
        return await getattr(thing, f"a{verb}")(*args, **kwargs)

    try:
        return asyncio.run(call())
    except Exception as error:
        return error


def plain(answer: Any) -> Any:
    """Without what is another one each time."""
    if isinstance(answer, JobInfo):
        return answer.id, answer.name, answer.state, answer.payload, answer.attempts, answer.reason
    if isinstance(answer, JobStatus):
        return answer._replace(created_at=NEVER)
    if isinstance(answer, DeadLetterRecord):
        return answer._replace(entered_at=0, expires_at=0)
    if isinstance(answer, Hold):
        return answer._replace(since=0)
    if isinstance(answer, Exception):
        return type(answer), str(answer)
    if isinstance(answer, list):
        return [plain(one) for one in answer]
    if isinstance(answer, FlowResult):
        return list(answer)
    if callable(answer):
        answer()
        return "ends it"
    return answer


def everything(storage: Storage) -> Any:
    """What can be read of the two queues, times left out."""
    found = {}
    for queue in (ORDERS, OTHER):
        ids = [record.id for record in storage.reads.page(queue, None, 100)]
        found[queue] = (
            {job_id: what_matters(storage, queue, job_id) for job_id in ids},
            {state: count for state, count in storage.reads.counts(queue).items() if count},
            storage.queues.is_paused(queue),
            storage.queues.key_limits(queue),
            [letter.id for letter in storage.reads.dead_letters(queue)],
        )
    return found


def what_matters(storage: Storage, queue: str, job_id: str) -> Any:
    record = record_of(storage, job_id, queue)
    return record.state, record.payload, record.options, record.attempts, record.result
