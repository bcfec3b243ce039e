"""The graph of jobs that are connected by dependencies."""

from collections.abc import Mapping, Sequence

from djqueue.core.graph import FlowGraph, FlowNode, JobLink, explore, link, walked
from djqueue.core.options import JobKey
from djqueue.core.states import State
from djqueue.storage.tables.rows import unpack_options

from .transaction import Tx

NODE = "job_id, name, state, reason, options, created_at, finished_at"


def flow(tx: Tx, key: JobKey, limit: int) -> FlowGraph | None:
    """Return the jobs connected to one by `depends_on`; None for an unknown job.

    Each step of the graph costs two statements for each of its queues.
    """
    return walked(explore(key, limit), lambda keys: _links(tx, keys, limit))


def _links(tx: Tx, keys: Sequence[JobKey], limit: int) -> Mapping[JobKey, JobLink]:
    """Return the existing jobs among these, with their own dependencies and their live dependents."""
    by_queue: dict[str, list[str]] = {}
    for queue, id in keys:
        by_queue.setdefault(queue, []).append(id)
    found: dict[JobKey, JobLink] = {}
    for queue, ids in by_queue.items():
        condition, values = tx.among("job_id", ids)
        rows = tx.rows(f"SELECT {NODE} FROM djqueue_job WHERE queue = ? AND {condition}", queue, values)
        dependents = _dependents(tx, queue, [row[0] for row in rows], limit)
        for id, name, state, reason, packed, created_at, finished_at in rows:
            node = FlowNode(
                queue, id, name, State(state), reason, created_at=created_at, finished_at=finished_at or 0
            )
            found[queue, id] = link(node, unpack_options(bytes(packed)), dependents.get(id, ()))
    return found


def _dependents(tx: Tx, queue: str, ids: Sequence[str], limit: int) -> dict[str, list[JobKey]]:
    """Return live jobs that depend on these: enough to find `limit` more of them."""
    if not ids:
        return {}
    condition, values = tx.among("d.job_id", ids)
    rows = tx.rows(
        "SELECT d.job_id, j.queue, j.job_id FROM djqueue_dependency d "
        f"JOIN djqueue_job j ON j.id = d.dependent WHERE d.queue = ? AND {condition} LIMIT ?",
        *(queue, values, 2 * limit + 1),
    )
    found: dict[str, list[JobKey]] = {}
    for id, *dependent in rows:
        found.setdefault(id, []).append((dependent[0], dependent[1]))
    return found
