"""Flow graphs: reading the graph of jobs around one job."""

from djqueue.core.flow import FlowGraph
from djqueue.core.job import Batch
from djqueue.core.options import JobKey
from djqueue.core.states import State
from djqueue.storage.base import Storage

from ..factories import QUEUE, UPSTREAM, claim_one, completing, enqueue, enqueue_many, failing, finish, job
from .case import StorageCase
from .flows import DOWNSTREAM, FLOW, a_flow, worked_off


def flow(storage: Storage, job_id: str, queue: str = QUEUE, limit: int = 1_000) -> FlowGraph:
    """Return the graph around a job that must be there."""
    found = storage.reads.flow(queue, job_id, limit)
    assert found is not None, f"could not find job {job_id!r} in queue {queue!r}"
    root = found.nodes[found.root]
    assert (root.queue, root.id) == (queue, job_id)
    return found


def keys(graph: FlowGraph) -> set[JobKey]:
    """Return the jobs of a graph."""
    return {node.key for node in graph.nodes}


def states(graph: FlowGraph) -> dict[str, State | None]:
    """States by id."""
    return {node.id: node.state for node in graph.nodes}


def edges(graph: FlowGraph) -> set[tuple[str, str, bool]]:
    """Which id comes before which, and whether it is waited for."""
    return {(graph.nodes[one.before].id, graph.nodes[one.after].id, one.unmet) for one in graph.edges}


def a_known_flow() -> list[Batch]:
    """`a_flow` as flows enqueue it: each job knows what comes after it."""
    first, second, third = a_flow()
    return [
        _leading(first, (QUEUE, "c")),
        _leading(second, (DOWNSTREAM, "d")),
        third,
    ]


def _leading(one: Batch, *after: JobKey) -> Batch:
    options = type(one.options).from_dict({**one.options.as_dict(), "dependents": after})
    return one._replace(options=options)


class FlowGraphsContract(StorageCase):
    """Cases about `flow`."""

    def test_graphs_of_several_jobs_are_read_together(self, storage: Storage) -> None:
        storage.enqueue(a_flow())
        wanted = [*FLOW, (QUEUE, enqueue(storage)), (QUEUE, "nobody")]

        found = storage.reads.flows(wanted)

        assert found == [storage.reads.flow(queue, job_id) for queue, job_id in wanted]
        assert found[-1] is None

    def test_flow_graph_is_found_from_each_of_its_jobs(self, storage: Storage) -> None:
        storage.enqueue(a_flow())

        for queue, job_id in FLOW:
            found = flow(storage, job_id, queue)
            assert keys(found) == set(FLOW)
            assert edges(found) == {("a", "c", True), ("b", "c", True), ("c", "d", True)}
            assert {node.id for node in found.nodes if node.unmet} == {"c", "d"}
            assert not found.cut

    def test_job_without_dependencies_is_its_whole_flow_graph(self, storage: Storage) -> None:
        alone = enqueue(storage)
        enqueue(storage)

        found = flow(storage, alone)

        assert keys(found) == {(QUEUE, alone)}
        assert found.edges == []
        [node] = found.nodes
        record = job(storage, alone)
        assert (node.name, node.state, node.created_at) == (record.name, State.WAITING, record.created_at)
        assert not node.unmet

    def test_unknown_job_has_no_flow_graph(self, storage: Storage) -> None:
        enqueue(storage)

        assert storage.reads.flow(QUEUE, "nobody") is None
        assert storage.reads.flow("never-used", "nobody") is None

    def test_flow_graph_has_states_and_met_dependencies(self, storage: Storage) -> None:
        storage.enqueue(a_flow())
        claimed = claim_one(storage)
        finish(storage, completing(claimed))
        other = ({"a", "b"} - {claimed.id}).pop()

        found = flow(storage, "d", DOWNSTREAM)

        assert edges(found) == {(claimed.id, "c", False), (other, "c", True), ("c", "d", True)}
        assert states(found)[claimed.id] is State.COMPLETED

    def test_flow_graph_of_finished_job_contains_live_dependents(self, storage: Storage) -> None:
        before = enqueue(storage)
        worked_off(storage)
        after = enqueue(storage, queue=DOWNSTREAM, depends_on=((QUEUE, before),), delay=3_600_000)

        found = flow(storage, before)

        assert keys(found) == {(QUEUE, before), (DOWNSTREAM, after)}
        assert edges(found) == {(before, after, False)}

    def test_completed_flow_graph_is_found_from_its_first_job(self, storage: Storage) -> None:
        storage.enqueue(a_known_flow())
        assert worked_off(storage) == [{"a", "b"}, {"c"}, {"d"}]

        found = flow(storage, "a", UPSTREAM)

        assert keys(found) == set(FLOW)
        assert set(states(found).values()) == {State.COMPLETED}
        assert edges(found) == {("a", "c", False), ("b", "c", False), ("c", "d", False)}

    def test_failed_flow_graph_has_the_reason_of_each_job(self, storage: Storage) -> None:
        storage.enqueue(a_known_flow())
        claimed = claim_one(storage)
        finish(storage, failing(claimed, "timeout"))

        found = flow(storage, claimed.id, UPSTREAM)

        reasons = {node.id: node.reason for node in found.nodes if node.state is State.FAILED}
        assert reasons == {claimed.id: "timeout", "c": "dependency_failed", "d": "dependency_failed"}
        assert {node.finished_at > 0 for node in found.nodes if node.state is State.FAILED} == {True}

    def test_flow_graph_keeps_unmet_edge_to_failed_dependency_with_policy_wait(
        self, storage: Storage
    ) -> None:
        before = enqueue(storage)
        after = enqueue(storage, depends_on=((QUEUE, before),), on_dependency_failure="wait")
        finish(storage, failing(claim_one(storage)))

        found = flow(storage, before)

        assert states(found) == {before: State.FAILED, after: State.BLOCKED}
        assert edges(found) == {(before, after, True)}

    def test_flow_graph_has_no_unmet_edge_to_ignored_failure(self, storage: Storage) -> None:
        first, second = enqueue_many(storage, 2)
        needs = ((QUEUE, first), (QUEUE, second))
        after = enqueue(storage, depends_on=needs, on_dependency_failure="ignore")
        claimed = claim_one(storage)
        finish(storage, failing(claimed))
        other = ({first, second} - {claimed.id}).pop()

        found = flow(storage, after)

        assert edges(found) == {(claimed.id, after, False), (other, after, True)}
        assert next(node for node in found.nodes if node.id == after).ignores

    def test_flow_graph_contains_removed_dependencies_without_state(self, storage: Storage) -> None:
        before = enqueue(storage, queue=UPSTREAM)
        worked_off(storage)
        after = enqueue(storage, depends_on=((UPSTREAM, before),))
        storage.jobs.remove(UPSTREAM, [before])

        found = flow(storage, after)

        assert states(found) == {before: None, after: State.WAITING}
        assert storage.reads.flow(UPSTREAM, before) is None

    def test_flow_graph_excludes_a_new_job_with_a_reused_id(self, storage: Storage) -> None:
        [first, second, third] = a_known_flow()
        storage.enqueue([first, second, third])
        storage.jobs.remove(DOWNSTREAM, ["d"])
        enqueue(storage, id="d", queue=DOWNSTREAM)

        assert keys(flow(storage, "c")) == set(FLOW[:3])

    def test_flow_graph_contains_moved_jobs(self, storage: Storage) -> None:
        storage.enqueue(a_flow())
        storage.jobs.move(UPSTREAM, ["a"], "elsewhere")
        storage.sweep()

        found = flow(storage, "a", "elsewhere")

        assert ("elsewhere", "a") in keys(found)
        assert (DOWNSTREAM, "d") in keys(found)
        assert ("a", "c", True) in edges(found)

    def test_flow_graph_respects_its_limit(self, storage: Storage) -> None:
        ids = enqueue_many(storage, 30)
        last = enqueue(storage, depends_on=tuple((QUEUE, one) for one in ids))

        some = flow(storage, last, limit=10)
        whole = flow(storage, last, limit=31)

        assert (len(some.nodes), some.cut) == (10, True)
        assert len(some.edges) == 9
        assert (len(whole.nodes), whole.cut) == (31, False)

    def test_reading_a_flow_graph_changes_nothing(self, storage: Storage) -> None:
        storage.enqueue(a_flow())
        before = [storage.reads.page(queue, None, 10) for queue in (UPSTREAM, QUEUE, DOWNSTREAM)]

        flow(storage, "c")

        assert [storage.reads.page(queue, None, 10) for queue in (UPSTREAM, QUEUE, DOWNSTREAM)] == before
        assert worked_off(storage) == [{"a", "b"}, {"c"}, {"d"}]
