"""Pages of jobs, read from the structures that contain them: see `lua/page.lua`."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from collections.abc import Callable, Sequence

from djqueue.core.errors import OptionError
from djqueue.core.job import JobRecord
from djqueue.core.pages import JobPage, Marked, page_of, position_of
from djqueue.core.states import State

from .keys import QueueKeys
from .records import text
from .roundtrips import ScriptCall, Steps
from .scripts import script

STRUCTURES = {
    State.WAITING: ("w", "z", "unhandled", "group_waiting"),
    State.DELAYED: ("due",),
    State.BLOCKED: ("unmet",),
    State.ACTIVE: ("lease",),
    State.COMPLETED: ("finished",),
    State.FAILED: ("dead",),
    State.CANCELLED: ("finished",),
}
"""Structures with the jobs of each state, in page order."""
OUTCOME_CODES = {State.COMPLETED: b"c", State.CANCELLED: b"x"}
AT_ONCE = 500
"""Entries of one read."""


def cursor_page(
    keys: QueueKeys,
    state: State,
    limit: int,
    cursor: str | None,
    jobs: Callable[[str, Sequence[str]], Steps[list[JobRecord | None]]],
    *,
    newest_first: bool,
) -> Steps[JobPage]:
    """Return a page of the jobs in a state."""
    position = position_of(cursor, newest_first=newest_first)
    structures = STRUCTURES[state][:: -1 if position.is_descending else 1]
    name, score, mark = _unpack(position.mark) if position.mark is not None else (structures[0], "", b"")
    if name not in structures:
        raise OptionError(f"cursor: {cursor!r} belongs to a page of another state")
    found: list[Marked] = []
    score_of: bytes | str = score
    for structure in structures[structures.index(name) :]:
        while len(found) <= limit:
            wanted = AT_ONCE if structure == "finished" else min(AT_ONCE, limit + 1 - len(found))
            arguments = [
                structure,
                wanted,
                int(position.is_descending),
                mark,
                score_of,
                OUTCOME_CODES.get(state, b""),
            ]
            [reply] = yield [ScriptCall(script("page"), keys, arguments, sequence=False)]
            entries = [tuple(reply[at : at + 3]) for at in range(0, len(reply), 3)]
            if not entries:
                break
            shown = [(text(job_id), *rest) for job_id, *rest in entries if job_id]
            records = yield from jobs(keys.queue, [job_id for job_id, *_ in shown])
            for (_, its_mark, its_score), record in zip(shown, records, strict=True):
                if record is not None and record.state is state:
                    found.append((_pack(structure, its_score, its_mark), record))
            _, mark, score_of = entries[-1]
        mark, score_of = b"", ""
    return page_of(found, limit, position)


def _pack(structure: str, score: bytes, mark: bytes) -> str:
    return f"{structure}:{text(score)}:{urlsafe_b64encode(mark).decode()}"


def _unpack(mark: str) -> tuple[str, str, bytes]:
    try:
        structure, score, packed = mark.split(":")
        return structure, score, urlsafe_b64decode(packed)
    except (ValueError, Error):
        raise OptionError(f"cursor: {mark!r} is invalid; pass the cursor of an earlier page") from None
