"""The facts that explain why a job is not running: see `core.explain`."""

from djqueue.core.explain import MAX_BEFORE, SHOWN, BlockingJob, Dependency, Explanation, Facts, decide
from djqueue.core.states import PENDING, State

from . import claim, dependencies, limiters, queues, rates, stored, unique
from .ready import LockedGroup, is_grouped
from .stored import StoredJob
from .transaction import Tx

HOLDERS = (
    "SELECT j.job_id, c.worker, c.queue FROM ("
    "SELECT id, worker, queue, started_at FROM djqueue_claim WHERE {which} "
    "ORDER BY started_at, id LIMIT ?) c JOIN djqueue_job j ON j.id = c.id ORDER BY c.started_at, c.id"
)


def explain(tx: Tx, queue: str, id: str) -> Explanation | None:
    """Explain why a job is not running; None for an unknown job."""
    job = stored.by_id(tx, queue, id, lock=False)
    return None if job is None else decide(_facts(tx, job), tx.storage.workers.alive(tx))


def _facts(tx: Tx, job: StoredJob) -> Facts:
    facts = Facts(tx.now, job.queue, job.id, job.name, job.state, job.run_at, worker=job.worker)
    if job.state is State.ACTIVE:
        until = tx.value("SELECT lease_until FROM djqueue_claim WHERE id = ?", job.pk) or tx.tick
        return facts._replace(lease_until=tx.now + max(0, until - tx.tick))
    if job.state not in PENDING:
        return facts
    facts = _limits(tx, job, facts)
    if job.state is State.BLOCKED:
        facts = facts._replace(unmet=(*_predecessor(tx, job), *_dependencies(tx, job)))
    return _grouped(tx, job, _shared(tx, job, facts))


def _limits(tx: Tx, job: StoredJob, facts: Facts) -> Facts:
    controls = queues.controls(tx, job.queue)
    wait = 0 if controls.rate is None else rates.wait(tx, job.queue, "", controls.rate)
    return facts._replace(
        paused=controls.paused,
        next_token_at=tx.now + wait if wait else None,
        weight=job.options.weight,
        concurrency=controls.concurrency,
        used=claim.taken(tx, job.queue),
        holders=_holders(tx, "queue = ?", job.queue),
        before=_ready_before(tx, job),
    )


def _ready_before(tx: Tx, job: StoredJob) -> int | None:
    """Return the number of jobs that are claimed before a ready one; None if it is not ready."""
    position = tx.row("SELECT rank, seq FROM djqueue_ready WHERE id = ?", job.pk)
    if position is None:
        return None
    ahead = "SELECT 1 FROM djqueue_ready WHERE queue = ? AND (rank, seq) < (?, ?) LIMIT ?"
    return int(tx.value(f"SELECT COUNT(*) FROM ({ahead}) ahead", job.queue, *position, MAX_BEFORE))


def _shared(tx: Tx, job: StoredJob, facts: Facts) -> Facts:
    name = tx.storage.policy(job.queue).limiter
    if name is None:
        return facts
    limiter = limiters.LockedLimiter(tx, name, lock=False)
    state, wait = limiter.state(), limiter.next_token()
    facts = facts._replace(
        limiter=name,
        limiter_next_at=tx.now + wait if wait else None,
        limiter_limit=state.concurrency,
        limiter_used=state.used,
    )
    if state.free is None:
        return facts
    return facts._replace(limiter_holders=_holders(tx, "limiter = ?", name, here=job.queue))


def _grouped(tx: Tx, job: StoredJob, facts: Facts) -> Facts:
    name = job.options.group
    if name is None or not is_grouped(tx, job):
        return facts
    group = LockedGroup(tx, job.queue, name, lock=False)
    facts = facts._replace(
        group=name,
        group_paused=group.paused,
        group_limit=group.limit,
        group_active=group.active(),
        group_holders=_holders(tx, 'queue = ? AND "group" = ?', job.queue, name),
    )
    seq = tx.value("SELECT seq FROM djqueue_held WHERE id = ?", job.pk)
    if seq is None:
        return facts
    rest_at = tx.value(
        "SELECT rest_at FROM djqueue_rate_bucket WHERE queue = ? AND name = ?", job.queue, name
    )
    if rest_at is not None:
        facts = facts._replace(group_next_at=tx.now + max(0, rest_at - tx.tick))
    ahead = 'SELECT 1 FROM djqueue_held WHERE queue = ? AND "group" = ? AND seq < ? LIMIT ?'
    held = tx.value(f"SELECT COUNT(*) FROM ({ahead}) ahead", job.queue, name, seq, MAX_BEFORE)
    return facts._replace(is_group_waiting=True, before=min(MAX_BEFORE, group.ready() + held))


def _holders(tx: Tx, which: str, *parameters: str, here: str | None = None) -> tuple[BlockingJob, ...]:
    """Return the active jobs that were claimed first; their queues only if they are not `here`."""
    found = tx.rows(HOLDERS.format(which=which), *parameters, SHOWN)
    return tuple(
        BlockingJob(id, worker, "" if here in (None, queue) else queue) for id, worker, queue in found
    )


def _predecessor(tx: Tx, job: StoredJob) -> tuple[Dependency, ...]:
    """Return the active job whose end lets a job have its unique key."""
    key = job.options.unique_key
    if key is None:
        return ()
    behind = tx.value(
        f"SELECT behind FROM djqueue_unique_key{unique.WHERE} AND successor = ?", job.queue, key, job.pk
    )
    owners = [] if behind is None else stored.by_keys(tx, [behind], lock=False)
    return tuple(Dependency(owner.queue, owner.id, owner.state) for owner in owners)


def _dependencies(tx: Tx, job: StoredJob) -> tuple[Dependency, ...]:
    unmet = sorted(dependencies.unmet_of(tx, job))
    states = dependencies.states_of(tx, unmet, lock=False)
    return tuple(Dependency(*key, states.get(key)) for key in unmet)
