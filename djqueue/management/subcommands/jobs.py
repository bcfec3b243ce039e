"""`manage.py djqueue jobs`, `job`, `enqueue`, `wait`, `cancel`, `retry`, `promote` and `move`."""

from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from django.core.management.base import CommandError

from djqueue.client import Queue, get_storage, registry
from djqueue.client.info import JobInfo
from djqueue.client.results import wait_for
from djqueue.core.errors import JobFailedError, ResultTimeoutError
from djqueue.core.job import EnqueueResult, JobRecord
from djqueue.core.messages import numbered
from djqueue.core.states import PENDING, State
from djqueue.dashboard import redaction, rendering
from djqueue.management.arguments import count, duration, json_list, json_object, json_value, seconds, state
from djqueue.models import BulkKind
from djqueue.operations import bulk
from djqueue.operations.bulk import Selection
from djqueue.runtime.exits import MISUSED
from djqueue.storage import actions
from djqueue.storage.actions import DONE
from djqueue.storage.base import Storage

from .base import Options, Output, Subcommands, add_confirmation, add_ids, located, note, used_queue

MAX_EXAMINED = 10_000
"""Jobs of a queue and state that are examined for a name or tag."""
PAGE = 200
"""Jobs read at a time."""

JOBS = """List jobs, newest first.

    manage.py djqueue jobs --queue emails --state failed --limit 50
    manage.py djqueue jobs --name shop.jobs.send_receipt --json
"""
JOB = """Show one job: its state, why it is not running, its history, payload and result.

Values with secret names are hidden, as on the dashboard; --show-payload shows them.
"""
ENQUEUE = """Enqueue one job.

NAME is a @job function, such as shop.jobs.send_receipt. A name that only workers know needs --queue, and
takes one --payload instead of arguments.

    manage.py djqueue enqueue shop.jobs.send_receipt --args '[42]' --delay 10m
    manage.py djqueue enqueue shop.jobs.total --kwargs '{"order": 42}' --wait 30
    manage.py djqueue enqueue resize --queue images --payload '{"path": "a.png"}'
"""
WAIT = """Wait until jobs end, and write their results.

The exit code is 0 if all completed, and 1 if one failed, was cancelled, or did not end in time.
"""
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


def add(subcommands: Subcommands) -> None:
    """Declare the subcommands."""
    parser = subcommands.add("jobs", jobs, JOBS)
    parser.add_argument("--queue", metavar="NAME", action="append", help="Only this queue; may be repeated.")
    parser.add_argument("--state", type=state, action="append", help="Only this state; may be repeated.")
    parser.add_argument("--name", default="", help="Only jobs with this name.")
    parser.add_argument("--tag", default="", help="Only jobs with this tag.")
    parser.add_argument("--limit", type=count, default=20, metavar="N", help="Maximum number (default: 20).")

    parser = subcommands.add("job", job, JOB)
    parser.add_argument("id", metavar="ID", help="ID of the job.")
    parser.add_argument(
        "--queue", metavar="NAME", help="Queue of the job (default: the one that has the ID)."
    )
    parser.add_argument("--show-payload", action="store_true", help="Show hidden values, too.")

    parser = subcommands.add("enqueue", enqueue, ENQUEUE)
    parser.add_argument("name", metavar="NAME", help="Name of the job.")
    parser.add_argument(
        "--args", dest="positional", type=json_list, default=[], metavar="JSON", help="Positional arguments."
    )
    parser.add_argument(
        "--kwargs", dest="keywords", type=json_object, default={}, metavar="JSON", help="Keyword arguments."
    )
    parser.add_argument("--payload", type=json_value, metavar="JSON", help="Payload of a job by name.")
    parser.add_argument("--queue", metavar="NAME", help="Queue (default: the job's own).")
    parser.add_argument("--id", metavar="ID", help="ID, which makes a repeated call a duplicate.")
    parser.add_argument("--delay", type=duration, metavar="TIME", help="Time until the start, such as 10m.")
    parser.add_argument("--priority", type=int, metavar="N", help="Higher first (default: 0).")
    parser.add_argument("--max-attempts", type=count, metavar="N", help="Maximum number of attempts.")
    parser.add_argument("--unique-key", metavar="KEY", help="Allow one live job with this key.")
    parser.add_argument("--wait", type=seconds, metavar="SECONDS", help="Wait for the result.")

    parser = subcommands.add("wait", wait, WAIT)
    add_ids(parser)
    parser.add_argument(
        "--timeout", type=seconds, default=30.0, metavar="SECONDS", help="Maximum time (default: 30)."
    )
    parser = subcommands.add("cancel", cancel, CANCEL)
    _add_matching(parser, "cancelled")
    parser.add_argument(
        "--state",
        type=state,
        action="append",
        help="Only this state; may be repeated (default: waiting, delayed, blocked and active).",
    )
    parser.add_argument("--name", default="", help="Only jobs with this name.")
    parser.add_argument("--tag", default="", help="Only jobs with this tag.")
    add_ids(subcommands.add("retry", retry, RETRY))
    parser = subcommands.add("promote", promote, PROMOTE)
    _add_matching(parser, "made claimable")
    parser = subcommands.add("move", move, MOVE)
    add_ids(parser)
    parser.add_argument("--to", metavar="NAME", required=True, help="Queue that gets the jobs.")


def jobs(options: Options, output: Output) -> None:
    """List jobs."""
    storage = get_storage()
    queues = [used_queue(storage, name) for name in options["queue"] or ()] or storage.queues.names()
    records: list[JobRecord] = []
    for queue in queues:
        for wanted in options["state"] or tuple(State):
            records += _matching(storage, queue, wanted, options)
    records.sort(key=lambda record: (record.created_at, record.id), reverse=True)
    del records[options["limit"] :]
    output.document([_summary(record) for record in records])
    output.table(
        ["id", "queue", "name", "state", "attempts", "enqueued"],
        [
            (one.id, one.queue, one.name, one.state, one.attempts, one.created_at)
            for one in map(JobInfo, records)
        ],
    )


def job(options: Options, output: Output) -> None:
    """Show one job."""
    storage = get_storage()
    [queue] = located(storage, [options["id"]], options["queue"])
    [record] = storage.reads.jobs(queue, [options["id"]])
    if record is None:
        raise CommandError(f"queue {queue!r} no longer has job {options['id']!r}")
    info, shown = JobInfo(record), options["show_payload"]
    if shown:
        note("reveal", queue=queue, job_id=record.id, count=1)
    reason = rendering.explained(storage.reads.explain(queue, record.id), lambda _: True)
    values = {
        **_summary(record),
        "not_running_because": None if reason is None else reason.sentence,
        "payload": redaction.payload(record, revealed=shown),
        "headers": redaction.headers(record.options.headers, revealed=shown) or None,
        "result": redaction.result(record, revealed=shown),
        "progress": info.progress,
    }
    history = [
        {
            "at": moment.at,
            "event": moment.event,
            "attempt": moment.attempt or None,
            "worker": moment.worker or None,
            "error": None if moment.error is None else moment.error.summary,
        }
        for moment in info.timeline
    ]
    logs = [{"at": at, "line": line} for at, line in info.logs]
    output.document({**values, "timeline": history, "logs": logs})
    for name, value in values.items():
        if value not in (None, "", [], ()):
            output.line(f"{name.replace('_', ' ')}: {_text(value)}")
    for moment in history:
        details = [str(value) for name, value in moment.items() if name not in ("at", "event") and value]
        output.line(f"  {_text(moment['at'])}  {moment['event']}  {'  '.join(details)}".rstrip())
    for entry in logs:
        output.line(f"  {_text(entry['at'])}  {entry['line']}")
    if record.error is not None and record.error.traceback:
        output.line(record.error.traceback.rstrip())


def enqueue(options: Options, output: Output) -> None:
    """Enqueue one job."""
    chosen = {
        name: options[name]
        for name in ("id", "queue", "delay", "priority", "max_attempts", "unique_key")
        if options[name] is not None
    }
    result = _enqueued(options, chosen)
    note("enqueue_now", queue=result.queue, job_id=result.id, count=1, detail={"name": options["name"]})
    document: dict[str, Any] = {"id": result.id, "queue": result.queue, "status": result.status}
    output.line(f"{result.status}: {result.id} in queue {result.queue}")
    if options["wait"] is not None:
        document["result"] = _ended(result.queue, result.id, options["wait"])
        output.line(f"result: {document['result']!r}")
    output.document(document)


def wait(options: Options, output: Output) -> None:
    """Wait until jobs end."""
    storage = get_storage()
    results = []
    for queue, ids in located(storage, options["ids"], options["queue"]).items():
        for job_id in ids:
            value = _ended(queue, job_id, options["timeout"])
            results.append({"id": job_id, "queue": queue, "result": value})
            output.line(f"{job_id}: {value!r}")
    output.document(results)


def _enqueued(options: Options, chosen: dict[str, Any]) -> EnqueueResult:
    name, job_type = options["name"], registry.find(options["name"])
    if job_type is not None:
        if options["payload"] is not None:
            raise CommandError(f"{name} takes --args and --kwargs, not --payload", returncode=MISUSED)
        return job_type.using(**chosen).enqueue(*options["positional"], **options["keywords"])
    if options["queue"] is None:
        registry.get(name)  # raises, with a suggestion
    if options["positional"] or options["keywords"]:
        raise CommandError(
            f"{name!r} is not a @job function here: pass one --payload instead of arguments",
            returncode=MISUSED,
        )
    queue = chosen.pop("queue")
    return Queue(queue).enqueue(options["payload"], name=name, **chosen)


def _ended(queue: str, job_id: str, timeout: float) -> Any:
    try:
        return wait_for(get_storage(), EnqueueResult(job_id, "queued", queue), timeout)
    except (JobFailedError, ResultTimeoutError) as error:
        raise CommandError(str(error)) from error


def _matching(storage: Storage, queue: str, wanted: State, options: Options) -> Sequence[JobRecord]:
    name, tag, limit = options["name"], options["tag"], options["limit"]
    records: list[JobRecord] = []
    for record in _newest(storage, queue, wanted, limit if not (name or tag) else PAGE):
        if name in ("", record.name) and tag in ("", *record.options.tags):
            records.append(record)
            if len(records) == limit:
                break
    return records


def _newest(storage: Storage, queue: str, wanted: State, size: int) -> Iterator[JobRecord]:
    """Yield the newest jobs of a state, up to `MAX_EXAMINED`."""
    cursor, examined = None, 0
    while examined < MAX_EXAMINED:
        page = storage.reads.cursor_page(queue, wanted, min(size, PAGE), cursor)
        yield from page.jobs
        examined += len(page.jobs)
        cursor = page.next
        if cursor is None:
            return


def _summary(record: JobRecord) -> dict[str, Any]:
    info = JobInfo(record)
    return {
        "id": info.id,
        "queue": info.queue,
        "name": info.name,
        "state": info.state.value,
        "priority": info.options.priority,
        "attempts": info.attempts,
        "max_attempts": info.options.max_attempts,
        "failures": info.failures,
        "stalls": info.stalls,
        "created_at": info.created_at,
        "run_at": info.run_at,
        "started_at": info.started_at,
        "finished_at": info.finished_at,
        "worker": info.worker or None,
        "reason": info.reason or None,
        "error": None if info.error is None else info.error.summary,
        "concurrency_key": info.options.concurrency_key,
        "unique_key": info.options.unique_key,
        "tags": list(info.options.tags),
        "subject": info.subject,
    }


def _text(value: Any) -> str:
    return value.isoformat(sep=" ", timespec="milliseconds") if hasattr(value, "isoformat") else str(value)


def cancel(options: Options, output: Output) -> None:
    """Cancel jobs."""
    states = options["state"] or CANCELLABLE
    if wrong := [one.value for one in states if one not in CANCELLABLE]:
        raise CommandError(f"--state {wrong[0]}: jobs in this state have ended", returncode=MISUSED)
    if not options["all"]:
        if options["state"] or options["name"] or options["tag"]:
            raise CommandError("filters choose jobs only together with --all", returncode=MISUSED)
        _each(options, output, actions.CANCEL.name, actions.CANCEL.apply)
        return
    _all(options, output, BulkKind.CANCEL, "cancel", states=states, name=options["name"], tag=options["tag"])


def retry(options: Options, output: Output) -> None:
    """Retry failed jobs."""
    _each(options, output, actions.RETRY.name, actions.RETRY.apply)


def promote(options: Options, output: Output) -> None:
    """Make delayed jobs claimable."""
    if options["all"]:
        _all(options, output, BulkKind.PROMOTE, "promote", states=(State.DELAYED,))
    else:
        _each(options, output, actions.PROMOTE.name, actions.PROMOTE.apply)


def move(options: Options, output: Output) -> None:
    """Move jobs to another queue."""
    to = options["to"]
    _each(options, output, "move", lambda storage, queue, ids: Queue(queue, storage=storage).move(ids, to))


def _add_matching(parser: ArgumentParser, changed: str) -> None:
    parser.add_argument("ids", metavar="ID", nargs="*", help="IDs of jobs.")
    parser.add_argument("--all", action="store_true", help="All jobs that match, instead of IDs.")
    parser.add_argument("--queue", metavar="NAME", help="Only this queue.")
    add_confirmation(parser, changed)


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
