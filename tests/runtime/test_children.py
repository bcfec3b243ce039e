"""Results of dependencies, as a handler reads them."""

import asyncio

import pytest

from djqueue import JobFailedError, Queue, State, chord, current_job, flow
from djqueue.errors import JobCancelledError, JobNotFoundError
from tests.runtime.running import HANDLER, work_off


def add_up(job):
    return [child.result for child in job.children()]


async def aadd_up(job):
    return [child.result for child in await job.achildren()]


@pytest.fixture(params=[add_up, aadd_up])
def parent(request):
    return request.param


async def ended(storage, queue, node, **handlers):
    await work_off(storage, {HANDLER: lambda job: job.payload * 2, **handlers})
    return queue.get_result(node.id)


async def test_parent_job_reads_results_of_children_in_order(storage, queue, parent):
    other = Queue("elsewhere", storage=storage)
    children = [(queue if number % 2 else other).node(number, name=HANDLER) for number in range(10)]
    last = queue.node(name="parent")
    chord(children, then=last).enqueue()

    assert await ended(storage, queue, last, parent=parent) == [number * 2 for number in range(10)]


async def test_parent_job_reads_the_state_of_each_child(storage, queue):
    def fails(job):
        raise ValueError("no such page")

    seen = []
    good, bad, gone = (queue.node(1, name=name) for name in (HANDLER, "fails", HANDLER))
    cancelled = queue.node(1, name=HANDLER, delay=3600)
    bad.options = queue.node(max_attempts=1).options
    last = queue.node(name="parent", on_dependency_failure="ignore").after(good, bad, cancelled, gone)
    flow(last).enqueue()
    queue.cancel(cancelled.id)
    queue.remove(gone.id)

    await work_off(
        storage,
        {HANDLER: lambda job: None, "fails": fails, "parent": lambda job: seen.extend(job.children())},
    )

    assert [child.id for child in seen] == [good.id, bad.id, cancelled.id, gone.id]
    assert [child.state for child in seen] == [State.COMPLETED, State.FAILED, State.CANCELLED, None]
    assert [child.queue for child in seen] == ["work"] * 4
    assert [child.name for child in seen] == [HANDLER, "fails", HANDLER, ""]
    assert seen[0].result is None
    assert (seen[0].error, seen[1].error.message, seen[3].error) == (None, "no such page", None)
    for child, error in zip(seen[1:], (JobFailedError, JobCancelledError, JobNotFoundError), strict=True):
        with pytest.raises(error, match=child.id):
            child.result  # noqa: B018
    assert "not found" in repr(seen[3])
    assert "completed" in repr(seen[0])


async def test_job_without_dependencies_has_no_children(storage, queue):
    seen = []
    queue.enqueue(name=HANDLER)

    await work_off(storage, lambda job: seen.append(job.children()))

    assert seen == [[]]


async def test_job_function_reads_children_from_current_job(storage, queue):
    async def parent(_):
        await asyncio.sleep(0)
        [child] = await current_job().achildren()
        return child.result

    last = queue.node(name="parent").after(queue.node(21, name=HANDLER))
    flow(last).enqueue()

    assert await ended(storage, queue, last, parent=parent) == 42
