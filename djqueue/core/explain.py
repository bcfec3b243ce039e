"""Why a job is not running: one verdict with its evidence, decided from a storage's facts."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .messages import gettext_noop
from .policies import Hold
from .states import PENDING, State
from .workers import WorkerInfo

MAX_BEFORE = 10_000
"""Maximum number of jobs before another one that are counted."""
SHOWN = 5
"""Number of active jobs that are named."""


class Dependency(NamedTuple):
    """A dependency of a blocked job."""

    queue: str
    id: str
    state: State | None
    """None if it is unknown by now."""


class BlockingJob(NamedTuple):
    """An active job that takes a slot or permit that another job waits for."""

    id: str
    worker: str
    queue: str = ""
    """Its queue, if that is not the waiting job's."""


class Verdict(NamedTuple):
    """A reason why a job does not run."""

    word: str
    meaning: str
    evidence: tuple[str, ...]
    """The fields of an explanation that show it."""
    sentence: str
    """Text about one job, with fields of its explanation; empty if the job is running or has finished."""


VERDICTS = (
    Verdict("not_pending", "the job is running or has finished", ("state",), ""),
    Verdict(
        "lease_of_dead_worker",
        "the worker that ran the job has died, and the lease has not expired yet",
        ("worker", "until"),
        gettext_noop("Worker %(worker)s has stopped responding. The job is retried when the lease expires."),
    ),
    Verdict(
        "paused",
        "the queue is paused",
        (),
        gettext_noop("The queue is paused. No job starts until the queue is resumed."),
    ),
    Verdict(
        "key_paused",
        "the concurrency key is paused",
        ("concurrency_key",),
        gettext_noop("Concurrency key %(concurrency_key)s is paused."),
    ),
    Verdict(
        "held",
        "the queue holds the jobs of this name",
        ("until", "reason"),
        gettext_noop("Jobs named %(name)s are held in this queue. None of them starts until the hold ends."),
    ),
    Verdict("delayed", "the job is not due yet", ("until",), gettext_noop("The job is scheduled for later.")),
    Verdict(
        "blocked",
        "the job has unfinished dependencies",
        ("unmet",),
        gettext_noop("The job waits for unfinished dependencies."),
    ),
    Verdict(
        "no_worker",
        "no live worker serves the queue",
        (),
        gettext_noop("No live worker serves the queue. Start one with manage.py runworkers."),
    ),
    Verdict(
        "no_handler",
        "no live worker of the queue has a handler for the job",
        ("workers",),
        gettext_noop(
            "No live worker of the queue has a handler for %(name)s. Deploy the code that defines the job."
        ),
    ),
    Verdict(
        "key_rate",
        "the concurrency key has reached its rate limit",
        ("concurrency_key", "until"),
        gettext_noop("Concurrency key %(concurrency_key)s has reached its rate limit."),
    ),
    Verdict(
        "key_busy",
        "the concurrency key has reached its concurrency limit",
        ("concurrency_key", "limit", "holders", "before"),
        gettext_noop("Concurrency key %(concurrency_key)s has reached its concurrency limit of %(limit)s."),
    ),
    Verdict(
        "behind_rate",
        "the queue has reached its rate limit",
        ("until", "before"),
        gettext_noop("The queue has reached its rate limit."),
    ),
    Verdict(
        "concurrency_full",
        "the queue has reached its concurrency limit",
        ("limit", "holders", "before"),
        gettext_noop("The queue has reached its concurrency limit of %(limit)s."),
    ),
    Verdict(
        "too_heavy",
        "the job needs more of the queue's slots than are free",
        ("weight", "free", "holders"),
        gettext_noop("The job needs %(weight)s slots; the queue has %(free)s free."),
    ),
    Verdict(
        "limiter_rate",
        "the shared limiter has reached its rate limit",
        ("limiter", "until", "before"),
        gettext_noop("The shared limiter %(limiter)s has reached its rate limit."),
    ),
    Verdict(
        "limiter_full",
        "the job needs more of the shared limiter's slots than are free",
        ("limiter", "limit", "weight", "free", "holders", "before"),
        gettext_noop(
            "The shared limiter %(limiter)s has %(free)s of %(limit)s slots free; the job needs %(weight)s."
        ),
    ),
    Verdict(
        "workers_busy",
        "no worker that could run the job has a free slot",
        ("workers", "before"),
        gettext_noop("Every worker that can run the job is busy. Add slots or workers."),
    ),
    Verdict(
        "waiting_turn",
        "other jobs are ahead, or the job is about to start",
        ("before",),
        gettext_noop("The job is about to start."),
    ),
)
"""Verdicts in the order in which they are checked: those that need an action come before those that pass by
themselves.

First the pauses of queue and concurrency key, and holds; then what the job itself waits for; whether a worker
can run it; limits, of the concurrency key before the queue before the shared limiter; its turn.
"""

BY_WORD = {verdict.word: verdict for verdict in VERDICTS}
OTHERS_AHEAD = gettext_noop("Other jobs are ahead.")
REASON = gettext_noop("Reason: %(reason)s")


class Facts(NamedTuple):
    """Facts of a storage about a job at one moment; those that do not concern its state may be missing."""

    at: int
    """UTC milliseconds, like the other times."""
    queue: str
    id: str
    name: str
    state: State
    run_at: int
    paused: bool = False
    """True if the queue is paused."""
    hold: Hold | None = None
    """Hold of its queue on the jobs of its name."""
    worker: str = ""
    """Worker that runs it, or ran it last."""
    lease_until: int | None = None
    """When the lease of an active job expires unless it is renewed."""
    unmet: tuple[Dependency, ...] = ()
    concurrency_key: str | None = None
    """None if it has none, or keys hold no job back in its queue."""
    key_paused: bool = False
    key_limit: int = 0
    key_active: int = 0
    key_holders: tuple[BlockingJob, ...] = ()
    key_next_at: int | None = None
    """When the concurrency key's rate lets the next job start; None: now."""
    is_group_waiting: bool = False
    """True if its concurrency key holds it back."""
    next_token_at: int | None = None
    """When the queue's rate lets the next job start; None: now."""
    weight: int = 1
    concurrency: int | None = None
    """Concurrency of the queue."""
    used: int = 0
    """Slots of the queue's concurrency in use."""
    holders: tuple[BlockingJob, ...] = ()
    """The first active jobs of the queue."""
    limiter: str | None = None
    """Limiter that the queue shares with others; None: none."""
    limiter_next_at: int | None = None
    """When the limiter's rate lets the next job start; None: now."""
    limiter_limit: int | None = None
    """Permits of the limiter; None: unlimited."""
    limiter_used: int = 0
    limiter_holders: tuple[BlockingJob, ...] = ()
    """Some active jobs of the queues that share the limiter."""
    before: int | None = None
    """Number of jobs before it, up to `MAX_BEFORE`; in its group, if that holds it back."""


class Explanation(NamedTuple):
    """Explanation why a job is not running. `VERDICTS` names the fields that show it; the others have their
    defaults.
    """

    queue: str
    id: str
    name: str
    """The job's name."""
    state: State
    at: int
    """When this was so, in UTC milliseconds, like `until`."""
    verdict: str
    until: int | None = None
    """When it may end by itself."""
    worker: str = ""
    """Worker of an active job."""
    concurrency_key: str | None = None
    limit: int | None = None
    """Maximum number of active jobs or slots."""
    weight: int | None = None
    free: int | None = None
    """Free slots of the queue's concurrency, or of the limiter."""
    unmet: tuple[Dependency, ...] = ()
    holders: tuple[BlockingJob, ...] = ()
    """The first five active jobs that take what it waits for."""
    workers: tuple[str, ...] = ()
    """Ids of the workers that serve its queue or, if these are busy, of those that could run it."""
    before: int | None = None
    """Number of jobs before it; 10,000 stands for that many or more."""
    limiter: str | None = None
    """Limiter that several queues share."""
    reason: str = ""
    """Reason given for the hold."""


def sentence(explanation: Explanation, translate: Callable[[str], str] = str) -> str:
    """Return an explanation as text; empty if the job is running or has finished, or for an unknown verdict.

    The time at which the reason may end, the jobs ahead and the dependencies are not part of it.
    """
    verdict = BY_WORD.get(explanation.verdict)
    text = "" if verdict is None else verdict.sentence
    if explanation.verdict == "waiting_turn" and explanation.before:
        text = OTHERS_AHEAD
    texts = (text, REASON) if text and explanation.reason else (text,)
    return " ".join(text and translate(text) % explanation._asdict() for text in texts)


def decide(facts: Facts, workers: Sequence[WorkerInfo]) -> Explanation:
    """Return the first of `VERDICTS` that is true, with its evidence.

    Args:
        workers: live workers, as of their last heartbeats.
    """
    verdict, evidence = _judge(facts, workers)
    return Explanation(facts.queue, facts.id, facts.name, facts.state, facts.at, verdict)._replace(**evidence)


def _judge(facts: Facts, workers: Sequence[WorkerInfo]) -> tuple[str, dict[str, Any]]:
    if facts.state not in PENDING:
        is_lost = facts.state is State.ACTIVE and all(worker.id != facts.worker for worker in workers)
        if is_lost:
            return "lease_of_dead_worker", {"worker": facts.worker, "until": facts.lease_until}
        return "not_pending", {}
    if facts.paused:
        return "paused", {}
    if facts.key_paused:
        return "key_paused", {"concurrency_key": facts.concurrency_key}
    due = facts.run_at if facts.state is State.DELAYED else facts.at
    if facts.hold is not None and (facts.hold.until is None or facts.hold.until > due):
        return "held", {"until": facts.hold.until, "reason": facts.hold.reason}
    if due > facts.at:
        return "delayed", {"until": due}
    if facts.state is State.BLOCKED:
        return "blocked", {"unmet": facts.unmet}
    serving = [worker for worker in workers if worker.state == "running" and _serves(worker, facts.queue)]
    if not serving:
        return "no_worker", {}
    able = [worker for worker in serving if facts.name in worker.names]
    if not able:
        return "no_handler", {"workers": _ids(serving)}
    return _limited(facts) or _shared(facts) or _in_line(facts, able)


def _limited(facts: Facts) -> tuple[str, dict[str, Any]] | None:
    if facts.key_next_at is not None and facts.key_next_at > facts.at:
        return "key_rate", {"concurrency_key": facts.concurrency_key, "until": facts.key_next_at}
    if facts.is_group_waiting and facts.key_active >= facts.key_limit:
        evidence = {
            "concurrency_key": facts.concurrency_key,
            "limit": facts.key_limit,
            "holders": facts.key_holders,
        }
        return "key_busy", {**evidence, "before": facts.before}
    if facts.next_token_at is not None and facts.next_token_at > facts.at:
        return "behind_rate", {"until": facts.next_token_at, "before": facts.before}
    if facts.concurrency is not None:
        free = facts.concurrency - facts.used
        if free <= 0:
            shown = {"limit": facts.concurrency, "holders": facts.holders}
            return "concurrency_full", {**shown, "before": facts.before}
        if min(facts.weight, facts.concurrency) > free:
            return "too_heavy", {"weight": facts.weight, "free": free, "holders": facts.holders}
    return None


def _shared(facts: Facts) -> tuple[str, dict[str, Any]] | None:
    shown = {"limiter": facts.limiter, "before": facts.before}
    if facts.limiter_next_at is not None and facts.limiter_next_at > facts.at:
        return "limiter_rate", {**shown, "until": facts.limiter_next_at}
    if facts.limiter_limit is not None:
        free = facts.limiter_limit - facts.limiter_used
        if min(facts.weight, facts.limiter_limit) > free:
            evidence = {"limit": facts.limiter_limit, "weight": facts.weight, "free": max(0, free)}
            return "limiter_full", {**shown, **evidence, "holders": facts.limiter_holders}
    return None


def _in_line(facts: Facts, able: Sequence[WorkerInfo]) -> tuple[str, dict[str, Any]]:
    if all(worker.active >= worker.concurrency for worker in able):
        return "workers_busy", {"workers": _ids(able), "before": facts.before}
    return "waiting_turn", {"before": facts.before}


def _serves(worker: WorkerInfo, queue: str) -> bool:
    return worker.queues is None or queue in worker.queues


def _ids(workers: Sequence[WorkerInfo]) -> tuple[str, ...]:
    return tuple(worker.id for worker in workers)
