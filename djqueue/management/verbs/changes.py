"""`manage.py djqueue cancel`, `retry`, `promote` and `move`."""

from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from django.core.management.base import CommandError

from djqueue.client import get_storage
from djqueue.client.queue import Queue
from djqueue.core.messages import numbered
from djqueue.core.states import PENDING, State
from djqueue.models import BulkKind
from djqueue.operations import bulk
from djqueue.operations.bulk import DONE, Selection
from djqueue.runtime.exits import MISUSED
from djqueue.storage.base import Storage

from .arguments import add_confirmation, add_ids, located, state, used_queue
from .auditing import note
from .base import Options, Output, Verbs

CANCEL = """Cancel jobs: pending ones never start, active ones are asked to stop.

Name jobs by their IDs, or all that match with --all:

    manage.py djqueue cancel 01890a5d-ac96-774b-bcce-b302099a8057
    manage.py djqueue cancel --all --queue emails --name shop.jobs.send_receipt
"""
RETRY = """Retry failed jobs: their dead letters become waiting jobs again.

`dead retry` retries all that match a filter.
"""
PROMOTE = """Make delayed jobs claimable now.

    manage.py djqueue promote ID
    manage.py djqueue promote --all --queue emails
"""
MOVE = """Move pending and failed jobs to another queue.

    manage.py djqueue move ID ID --to slow
"""
CANCELLABLE = (*sorted(PENDING), State.ACTIVE)
"""States of jobs that can be cancelled, in the order in which all are."""

Apply = Callable[[Storage, str, Sequence[str]], Mapping[str, str]]
"""Changes jobs of one queue; returns the outcome of each."""


def add(verbs: Verbs) -> None:
    """Declare the verbs."""
    parser = verbs.add("cancel", cancel, CANCEL)
    _add_matching(parser, "cancelled")
    parser.add_argument(
        "--state",
        type=state,
        action="append",
        help="Only this state; may be repeated (default: waiting, delayed, blocked and active).",
    )
    parser.add_argument("--name", default="", help="Only jobs with this name.")
    parser.add_argument("--tag", default="", help="Only jobs with this tag.")
    add_ids(verbs.add("retry", retry, RETRY))
    parser = verbs.add("promote", promote, PROMOTE)
    _add_matching(parser, "made claimable")
    parser = verbs.add("move", move, MOVE)
    add_ids(parser)
    parser.add_argument("--to", metavar="NAME", required=True, help="Queue that gets the jobs.")


def cancel(options: Options, output: Output) -> None:
    """Cancel jobs."""
    states = options["state"] or CANCELLABLE
    if wrong := [one.value for one in states if one not in CANCELLABLE]:
        raise CommandError(f"--state {wrong[0]}: jobs in this state have ended", returncode=MISUSED)
    if not options["all"]:
        if options["state"] or options["name"] or options["tag"]:
            raise CommandError("filters choose jobs only together with --all", returncode=MISUSED)
        _each(options, output, "cancel", _cancelled)
        return
    _all(options, output, BulkKind.CANCEL, "cancel", states=states, name=options["name"], tag=options["tag"])


def retry(options: Options, output: Output) -> None:
    """Retry failed jobs."""
    _each(options, output, "retry", lambda storage, queue, ids: _paired(ids, storage.jobs.retry(queue, ids)))


def promote(options: Options, output: Output) -> None:
    """Make delayed jobs claimable."""
    if options["all"]:
        _all(options, output, BulkKind.PROMOTE, "promote", states=(State.DELAYED,))
    else:
        _each(options, output, "promote", _promoted)


def move(options: Options, output: Output) -> None:
    """Move jobs to another queue."""
    to = options["to"]
    _each(options, output, "move", lambda storage, queue, ids: Queue(queue, storage=storage).move(ids, to))


def _add_matching(parser: ArgumentParser, changed: str) -> None:
    parser.add_argument("ids", metavar="ID", nargs="*", help="IDs of jobs.")
    parser.add_argument("--all", action="store_true", help="All jobs that match, instead of IDs.")
    parser.add_argument("--queue", metavar="NAME", help="Only this queue.")
    add_confirmation(parser, changed)


def _cancelled(storage: Storage, queue: str, ids: Sequence[str]) -> Mapping[str, str]:
    return _paired(ids, [one.status for one in storage.jobs.cancel(queue, ids)])


def _promoted(storage: Storage, queue: str, ids: Sequence[str]) -> Mapping[str, str]:
    answers = ["promoted" if one else "not_delayed" for one in storage.jobs.promote(queue, ids)]
    return _paired(ids, answers)


def _paired(ids: Sequence[str], answers: Sequence[str]) -> Mapping[str, str]:
    return dict(zip(ids, answers, strict=True))


def _each(options: Options, output: Output, action: str, apply: Apply) -> None:
    """Change the named jobs, and report each. Raises CommandError unless all were changed."""
    storage = get_storage()
    if not options["ids"]:
        raise CommandError("name the IDs of jobs, or pass --all", returncode=MISUSED)
    rows = []
    for queue, ids in located(storage, options["ids"], options["queue"]).items():
        if options.get("dry_run"):
            states = storage.reads.states(queue, ids)
            rows += [(job_id, queue, f"{found}") for job_id, found in zip(ids, states, strict=True)]
            continue
        outcomes = apply(storage, queue, ids)
        rows += [(job_id, queue, word) for job_id, word in outcomes.items()]
        for job_id in ids:
            note(action, queue=queue, job_id=job_id, count=1)
    output.document([{"id": job_id, "queue": queue, "outcome": word} for job_id, queue, word in rows])
    output.table(["id", "queue", "state now" if options.get("dry_run") else "outcome"], rows)
    refused = [job_id for job_id, _, word in rows if word not in DONE | {"moved"}]
    if refused and not options.get("dry_run"):
        raise CommandError(f"not changed: {len(refused):,} of {numbered(len(rows), 'job')}")


def _all(
    options: Options,
    output: Output,
    kind: str,
    action: str,
    *,
    states: Sequence[State],
    name: str = "",
    tag: str = "",
) -> None:
    """Change all jobs that match, in parts, after a preview and a confirmation."""
    storage = get_storage()
    if options["ids"]:
        raise CommandError("IDs and --all can't be combined: remove one of them", returncode=MISUSED)
    queue = options["queue"]
    queues = storage.queues.names() if queue is None else [used_queue(storage, queue)]
    selection = Selection(tuple(queues), states=tuple(one.value for one in states), name=name, tag=tag)
    now = storage.reads.overview(queues[:1]).at
    expected = bulk.preview(storage, kind, selection, before=now) if queues else None
    matching = 0 if expected is None else expected.matching
    capped = expected is not None and expected.capped
    text = f"{matching:,} or more matching jobs" if capped else numbered(matching, "matching job")
    if options["dry_run"] or not matching:
        output.document({"matching": matching, "changed": 0})
        output.line(f"{text}; nothing was changed.")
        return
    output.confirm(f"{action.capitalize()} {text}?", assume_yes=options["no_input"])
    outcomes: Counter[str] = Counter()
    for part in bulk.run_now(storage, kind, selection, now):
        outcomes += part
        output.progress(f"{outcomes.total():,} of {text}")
    changed = sum(number for word, number in outcomes.items() if word in DONE)
    note(f"all_{action}_begin", queue=queue or "", count=changed, detail={"states": list(selection.states)})
    output.document({"matching": matching, "changed": changed, "outcomes": dict(outcomes)})
    for word, number in outcomes.most_common():
        output.line(f"{number:,} {word.replace('_', ' ')}")
