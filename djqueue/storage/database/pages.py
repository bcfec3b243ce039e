"""Pages of jobs by state, and of streamed items."""

from collections.abc import Sequence

from djqueue.core.job import ItemMark, ItemPage
from djqueue.core.pages import JobPage, PagePosition, mark_of, page_of, position_of
from djqueue.core.states import State
from djqueue.core.streams import PAGE_ITEMS, are_readable, cut
from djqueue.storage.tables.rows import unpack_options

from . import stored
from .dialects import Row
from .transaction import Tx

ORDERS = {
    State.DELAYED: ("djqueue_delayed", "run_at"),
    State.ACTIVE: ("djqueue_claim", "started_at"),
}
"""The tables of jobs in a state, and the times by which they are paged; other states are paged by row."""
AT_ONCE = 100
"""Maximum number of items of one statement."""


def cursor_page(
    tx: Tx, queue: str, state: State, limit: int, cursor: str | None, *, newest_first: bool
) -> JobPage:
    """Return up to `limit` jobs of one state."""
    position = position_of(cursor, newest_first=newest_first)
    found = _positions(tx, queue, state, limit + 1, position)
    jobs = {job.pk: job for job in stored.by_keys(tx, [pk for _, pk in found], lock=False)}
    return page_of([(f"{at}:{pk}", jobs[pk].record()) for at, pk in found if pk in jobs], limit, position)


def _positions(tx: Tx, queue: str, state: State, limit: int, position: PagePosition) -> list[Row]:
    """Return the times, or 0, and primary keys of the jobs of a page."""
    order = "DESC" if position.is_descending else "ASC"
    sign = "<" if position.is_descending else ">"
    at, pk = (0, 0) if position.mark is None else _mark(position.mark)
    has_mark = position.mark is not None
    if state in ORDERS:
        table, time = ORDERS[state]
        behind = f" AND ({time}, id) {sign} (?, ?)" if has_mark else ""
        some = f"SELECT {time}, id FROM {table} WHERE queue = ?{behind}"
        ordered = f"{some} ORDER BY {time} {order}, id {order} LIMIT ?"
        return tx.rows(ordered, queue, *((at, pk) if has_mark else ()), limit)
    behind = f" AND id {sign} ?" if has_mark else ""
    statement = (
        f"SELECT 0, id FROM djqueue_job WHERE queue = ? AND state = ?{behind} ORDER BY id {order} LIMIT ?"
    )
    return tx.rows(statement, queue, state.value, *((pk,) if has_mark else ()), limit)


def _mark(mark: str) -> tuple[int, int]:
    at, pk = mark_of(mark)
    return at, mark_of(f"{pk}:")[0]


def items(tx: Tx, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
    """Return the streamed items behind each mark with the state of the job; None for an unknown job."""
    condition, values = tx.among("job_id", list(dict.fromkeys(mark.id for mark in marks)))
    found = (
        "SELECT job_id, state, options, finished_at, items, token FROM djqueue_job WHERE queue = ? AND "
        + condition
    )
    jobs = {row[0]: row for row in (tx.rows(found, queue, values) if marks else ())}
    runs = _runs(tx, queue, [id for id, row in jobs.items() if row[4]])
    return [None if mark.id not in jobs else _page(tx, queue, mark, jobs[mark.id], runs) for mark in marks]


def _runs(tx: Tx, queue: str, ids: Sequence[str]) -> dict[str, int]:
    """Return the attempts that have sent the items of jobs."""
    if not ids:
        return {}
    condition, values = tx.among("job_id", ids)
    first = f"SELECT job_id, run FROM djqueue_job_item WHERE queue = ? AND {condition} AND number = 0"
    return dict(tx.rows(first, queue, values))


def _page(tx: Tx, queue: str, mark: ItemMark, row: Row, runs: dict[str, int]) -> ItemPage:
    _, state, packed, finished_at, count, token = row
    state, options = State(state), unpack_options(bytes(packed))
    run = runs.get(mark.id) or (token if state is State.ACTIVE else 0)
    start = mark.start if mark.run == run else 0
    found: tuple[bytes, ...] = ()
    if start < count and are_readable(state, options, finished_at or 0, tx.now):
        found = _items(tx, queue, mark.id, start)
    return ItemPage(state, options.content_type, run, start, found, max(count, start + len(found)))


def _items(tx: Tx, queue: str, id: str, start: int) -> tuple[bytes, ...]:
    """Return the items from a number on, as many as one page holds."""
    found: list[bytes] = []
    ahead = "SELECT item FROM djqueue_job_item WHERE queue = ? AND job_id = ? AND number >= ?"
    statement = f"{ahead} ORDER BY number LIMIT ?"
    while True:
        # Not a whole page of large items: most of them would be too many.
        some = [bytes(item) for (item,) in tx.rows(statement, queue, id, start + len(found), AT_ONCE)]
        found += some
        page = cut(found)
        if len(some) < AT_ONCE or len(page) < len(found) or len(page) == PAGE_ITEMS:
            return page
