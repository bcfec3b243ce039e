"""A call with a lost reply is sent again: it changes nothing more and returns the same reply."""

from contextlib import closing, contextmanager

import pytest
import redis

from djqueue.core.policies import KeyLimit, LimiterPolicy, QueuePolicy, Rate
from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage
from djqueue.storage.redis.records import plain_reply, unpack_ids
from djqueue.storage.redis.scripts import script
from djqueue.testing.factories import (
    DELAY,
    ENDINGS,
    PAYLOAD,
    QUEUE,
    UPSTREAM,
    a_cancelled_job,
    a_completed_job,
    a_delayed_job,
    a_failed_job,
    a_waiting_job,
    an_active_job,
    batch,
    claim,
    claim_ids,
    claim_one,
    completing,
    counts,
    emission_of,
    enqueue,
    enqueue_many,
    failing,
    finish,
    items_of,
    job,
    lease_of,
    releasing,
    report_of,
    request,
    retrying,
    state,
)
from tests.clocks import AheadClock
from tests.support import PATIENCE

pytestmark = pytest.mark.redis

SEQUENCE = b":sequence:"
SCRIPTS = (b"EVALSHA", b"EVAL")
LOST = "the answer was lost"
EVERY_STATE = frozenset(State)


class Twice:
    """What asks the server, but loses each command's first answer, and looks at what a second
    sending of it changes."""

    def __init__(self, command, snapshot):
        self.seen = 0
        self._command = command
        self._snapshot = snapshot
        self._lost = {}

    def __call__(self, words):
        answer = self._command(words)
        self._judge(words, answer)
        return answer

    def _judge(self, words, answer):
        lost = self._lost.pop(tuple(words), None)
        if lost is None:
            self._lost[tuple(words)] = answer, self._snapshot()
            raise redis.ConnectionError(LOST)
        first, before = lost
        self.seen += 1
        assert self._snapshot() == before, f"the second {words[:2]} changed something"
        assert words[0] not in SCRIPTS or alike(first, answer), f"{words[:2]} answered {first}, then {answer}"


class AsyncTwice(Twice):
    """The same on an event loop."""

    async def __call__(self, words):
        answer = await self._command(words)
        self._judge(words, answer)
        return answer


def alike(first, second):
    """Whether two answers say the same; a claim's second one names the jobs without their records, and an
    enqueue's has 1 for results."""
    match first, second:
        case bytes(), bytes() if first[:1] == b"d":
            return second[:1] == b"a" and alike(*([0, [*plain_reply(reply, 0)]] for reply in (first, second)))
        case [left, [*replies]], [left_again, [*again]] if any(map(has_result, replies)):
            replies = [[*reply[:3], 1] if has_result(reply) else reply for reply in replies]
            return (left, replies) == (left_again, again)
        case [left, [b"done" | b"plain", *ends]], [left_again, [b"again", *ends_again]]:
            # The claimed jobs are the first list behind the word.
            place = next(place for place, end in enumerate(ends) if isinstance(end, list))
            ends[place] = ends[place][::3]
            if isinstance(again := ends_again[place], bytes):  # those of the finished jobs come before them
                ids = [id.encode() for id in unpack_ids(again)] if again else []
                ends_again[place] = ids[len(ids) - len(ends[place]) :]
            return (left, ends) == (left_again, ends_again)
    return first == second


def has_result(reply):
    return isinstance(reply, list) and len(reply) == 4 and reply[0] == b"completed"


LAST = "keep_last_if_active"


@pytest.fixture(params=["single", pytest.param("cluster", marks=pytest.mark.thorough)])
def nodes(request):
    """The servers, which are empty."""
    if request.param == "single":
        request.getfixturevalue("redis_options")
        return [request.getfixturevalue("redis_server")]
    request.getfixturevalue("cluster_options")
    return request.getfixturevalue("redis_cluster").nodes


across_masters = pytest.mark.parametrize("nodes", ["single", "cluster"], indirect=True)


@pytest.fixture
def storage(nodes, request):
    cluster = len(nodes) > 1
    options = request.getfixturevalue("redis_cluster" if cluster else "redis_server").options
    policies = {
        "limited": QueuePolicy(rate=Rate(5, 3_600_000), concurrency=3),
        "shared": QueuePolicy(limiter="three"),
    }
    limiters = {"three": LimiterPolicy(rate=Rate(5, 3_600_000), concurrency=3)}
    with closing(RedisStorage(policies=policies, limiters=limiters, timeout=PATIENCE, **options)) as made:
        yield made


@pytest.fixture
def snapshot(nodes):
    """All keys but the request sequences, with what is in them and when they lapse."""
    clients = [redis.Redis(port=node.port, protocol=2, retry=None) for node in nodes]

    def take():
        found = {}
        for client in clients:
            for key in client.scan_iter(count=1_000):
                if SEQUENCE not in key:
                    found[key] = client.dump(key), client.pexpiretime(key)
        return found

    yield take
    for client in clients:
        client.close()


@pytest.fixture
def twice(storage, snapshot, monkeypatch):
    """Meanwhile every command's first answer is lost."""

    @contextmanager
    def losing():
        exchange = storage._roundtrips._exchange
        lossy = Twice(exchange.ask, snapshot)
        with monkeypatch.context() as patches:
            patches.setattr(exchange, "ask", lossy)
            yield
        assert lossy.seen > 0

    return losing


def test_repeated_enqueue_of_new_jobs_changes_nothing(storage, twice):
    with twice():
        results = storage.enqueue([batch(3)])

    assert [result.status for result in results] == ["queued"] * 3
    assert claim_ids(storage, 9) == [result.id for result in results]


def test_repeated_enqueue_with_ids_changes_nothing(storage, twice):
    a_completed_job(storage, id="done")
    a_failed_job(storage, id="dead")

    with twice():
        results = storage.enqueue([batch(ids=["done", "dead", "new", "new"])])

    assert [result.status for result in results] == ["completed", "queued", "queued", "duplicate"]
    assert claim_ids(storage, 9) == ["dead", "new"]


def test_repeated_enqueue_returns_results_that_are_not_kept_with_its_reply(storage, twice, nodes):
    result = b"r" * 100_000
    for job_id in ("a", "b"):
        finish(storage, completing(an_active_job(storage, id=job_id), result))

    with twice():
        answers = storage.enqueue([batch(ids=["a", "new", "b"])])

    assert [answer.status for answer in answers] == ["completed", "queued", "completed"]
    assert [answer.result for answer in answers] == [result, None, result]
    for node in nodes:
        with redis.Redis(port=node.port, protocol=2) as client:
            kept = [client.strlen(key) for key in client.scan_iter(match=b"*" + SEQUENCE + b"*")]
            assert max(kept, default=0) < 10_000


def test_repeated_enqueue_with_unique_keys_changes_nothing(storage, twice):
    with twice():
        first = storage.enqueue([batch(ids=["a"], unique_key="key")])
        second = storage.enqueue([batch(ids=["b"], unique_key="key", unique_ttl=DELAY)])

    assert [(result.status, result.id) for result in first + second] == [("queued", "a"), ("duplicate", "a")]
    assert counts(storage) == {State.WAITING: 1}


def test_repeated_enqueue_of_replacing_jobs_changes_nothing(storage, twice):
    with twice():
        first = storage.enqueue([batch(ids=["a", "b"], unique_key="key", on_duplicate="replace")])
        claimed = claim_one(storage)
        following = storage.enqueue([batch(ids=["c", "d"], unique_key="key", on_duplicate=LAST)])
        finish(storage, retrying(claimed))

    assert [result.replaced for result in first + following] == [None, "a", None, "c"]
    assert counts(storage) == {State.CANCELLED: 3, State.WAITING: 1}
    assert claim_ids(storage, 5) == ["d"]


def test_repeated_enqueue_of_delayed_and_grouped_jobs_changes_nothing(storage, twice):
    with twice():
        storage.enqueue([batch(2, delay=DELAY, priority=3), batch(3, concurrency_key="g", ttl=DELAY)])

    assert counts(storage) == {State.DELAYED: 2, State.WAITING: 3}
    assert len(claim(storage, 9)) == 1


@across_masters
@pytest.mark.parametrize("queue", [QUEUE, UPSTREAM])
def test_repeated_enqueue_of_dependents_changes_nothing(storage, twice, queue):
    upstream = enqueue(storage, queue=UPSTREAM)

    with twice():
        dependent = enqueue(storage, queue=queue, depends_on=((UPSTREAM, upstream),))

    assert state(storage, dependent, queue) is State.BLOCKED
    assert finish(storage, completing(claim_one(storage, queues=[UPSTREAM]))) == [True]
    assert state(storage, dependent, queue) is State.WAITING


@pytest.mark.parametrize("ending", ENDINGS)
def test_repeated_finish_and_claim_changes_nothing(storage, twice, ending):
    held = an_active_job(storage, id="held")
    enqueue_many(storage, 5)

    with twice():
        ended = storage.finish([ENDINGS[ending](held)], request(3))

    assert ended.accepted == [True]
    assert len(ended.claims.jobs) == 3
    assert all(renewal.held for renewal in storage.renew(list(map(lease_of, ended.claims.jobs))))
    assert finish(storage, *map(completing, ended.claims.jobs)) == [True] * 3
    assert finish(storage, completing(held)) == [False]


def test_repeated_claim_returns_the_same_payloads_and_counters(storage, twice):
    finish(storage, ENDINGS["retry"](an_active_job(storage, id="tried", payload=b"\x01")))
    enqueue(storage, id="new", payload=b"\x02")

    with twice():
        claimed = claim(storage, 5)

    assert sorted((one.id, one.payload, one.attempts, one.failures) for one in claimed) == [
        ("new", b"\x02", 1, 0),
        ("tried", b"\x01", 2, 1),
    ]


def test_repeated_claim_of_a_limited_queue_uses_the_limit_once(storage, twice):
    enqueue_many(storage, 9, queue="limited")

    with twice():
        claimed = claim(storage, 9)
        ended = storage.finish(list(map(completing, claimed)), request(9))

    assert len(claimed) == 3
    assert ended.accepted == [True] * 3
    assert len(ended.claims.jobs) == 2


@across_masters
def test_repeated_claim_under_a_shared_limiter_uses_the_limit_once(storage, twice):
    enqueue_many(storage, 9, queue="shared")

    with twice():
        claimed = claim(storage, 9)
        assert storage.limiters.state("three").used == 3
        ended = storage.finish(list(map(completing, claimed)), request(9))
        renewals = storage.renew(list(map(lease_of, ended.claims.jobs)))
        assert [renewal.held for renewal in renewals] == [True] * 2
        assert storage.limiters.state("three").used == 2
        finish(storage, *map(completing, ended.claims.jobs))
        storage.limiters.set("three", Rate(9, 3_600_000), 4)
        assert claim(storage, 1, queues=["shared"])

    assert len(claimed) == 3
    assert ended.accepted == [True] * 3
    state = storage.limiters.state("three")
    assert (state.used, state.concurrency, state.tokens) == (1, 4, 8)


@across_masters
def test_repeated_finish_unblocks_dependents_in_another_queue(storage, twice):
    upstream = enqueue(storage, queue=UPSTREAM)
    dependent = enqueue(storage, depends_on=((UPSTREAM, upstream),))
    claimed = claim_one(storage, queues=[UPSTREAM])

    with twice():
        accepted = finish(storage, completing(claimed))

    assert accepted == [True]
    assert state(storage, dependent) is State.WAITING


def test_repeated_renew_changes_nothing(storage, twice):
    held, asked = an_active_job(storage, id="held"), an_active_job(storage, id="asked")
    storage.jobs.cancel(QUEUE, ["asked"])

    with twice():
        renewals = storage.renew([lease_of(held), lease_of(asked), lease_of(held)._replace(token=1)])

    assert [tuple(renewal) for renewal in renewals] == [(True, False), (True, True), (False, False)]


def test_repeated_report_changes_nothing(storage, twice):
    held = an_active_job(storage)

    with twice():
        accepted = storage.report([report_of(held, 50, [(1, "begun"), (2, "half way")])])

    assert accepted == [True]
    record = job(storage, held.id)
    assert (record.progress, record.logs) == (50, ((1, "begun"), (2, "half way")))


def test_repeated_emit_changes_nothing(storage, twice):
    held = an_active_job(storage)

    with twice():
        accepted = storage.emit([emission_of(held, 0, b"one", b"two"), emission_of(held, 2, b"three")])
        accepted += storage.emit(
            [emission_of(held, 9, b"ten"), emission_of(held, 1, b"two", b"three", b"four")]
        )

    assert accepted == [True, True, False, True]
    assert items_of(storage, held.id) == [b"one", b"two", b"three", b"four"]


def test_repeated_finish_of_a_job_with_items_changes_nothing(storage, twice):
    first = an_active_job(storage, result_ttl=DELAY)
    other = an_active_job(storage)
    storage.emit([emission_of(first, 0, b"one"), emission_of(other, 0, b"two")])

    with twice():
        assert finish(storage, completing(first), retrying(other)) == [True, True]
        assert finish(storage, completing(claim_one(storage))) == [True]

    assert items_of(storage, first.id) == [b"one"]
    assert items_of(storage, other.id) == []


def test_repeated_cancel_changes_nothing(storage, twice):
    an_active_job(storage, id="active")
    a_waiting_job(storage, id="waiting")
    told = []
    storage.on_incidents = told.extend

    with twice():
        results = storage.jobs.cancel(QUEUE, ["active", "waiting", "waiting", "unknown"])

    assert [result.status for result in results] == ["requested", "cancelled", "cancelled", "not_found"]
    assert counts(storage) == {State.ACTIVE: 1, State.CANCELLED: 1}
    assert [(incident.id, incident.event) for incident in told] == [("waiting", "cancelled")]


def test_repeated_promote_reschedule_and_update_change_nothing(storage, twice):
    a_delayed_job(storage, id="sooner")
    a_waiting_job(storage, id="later")

    with twice():
        promoted = storage.jobs.promote(QUEUE, ["sooner", "later"])
        rescheduled = storage.jobs.reschedule(QUEUE, ["later", "unknown"], 4_000_000_000_000)

        updated = storage.jobs.update(QUEUE, ["sooner", "unknown"], 3, b"other")

    assert (promoted, rescheduled, updated) == ([True, False], [True, False], [True, False])
    assert counts(storage) == {State.WAITING: 1, State.DELAYED: 1}
    assert claim_ids(storage, 5) == ["sooner"]


def test_repeated_retry_changes_nothing(storage, twice):
    a_failed_job(storage, id="dead")

    with twice():
        answers = storage.jobs.retry(QUEUE, ["dead", "unknown"])

    assert answers == ["retried", "not_found"]
    assert storage.reads.dead_letters(QUEUE) == []
    assert claim_ids(storage, 5) == ["dead"]


def test_repeated_replace_payload_changes_nothing(storage, twice):
    a_failed_job(storage, id="dead")
    a_waiting_job(storage, id="waiting")

    with twice():
        answers = [
            storage.jobs.replace_payload(QUEUE, "dead", b"new", PAYLOAD, retry=True),
            storage.jobs.replace_payload(QUEUE, "waiting", b"new", PAYLOAD),
            storage.jobs.replace_payload(QUEUE, "waiting", b"newer", PAYLOAD),
        ]

    assert answers == ["retried", "updated", "changed"]
    assert [one.payload for one in claim(storage, 5)] == [b"new", b"new"]


def test_repeated_remove_and_clean_change_nothing(storage, twice):
    a_completed_job(storage, id="done")
    a_cancelled_job(storage, id="cancelled")
    a_waiting_job(storage, id="waiting")

    with twice():
        removed = storage.jobs.remove(QUEUE, ["waiting", "unknown"])
        cleaned = storage.queues.clean(QUEUE, EVERY_STATE, 4_000_000_000_000)

    assert (removed, cleaned) == ([True, False], 2)
    assert counts(storage) == {}


def test_repeated_pause_resume_and_set_limits_change_nothing(storage, twice):
    a_waiting_job(storage)

    with twice():
        storage.queues.pause(QUEUE)
        assert claim(storage) == []
        storage.queues.resume(QUEUE)
        storage.queues.set_limits(QUEUE, Rate(1, DELAY), 1)
        assert len(claim(storage)) == 1


def test_repeated_key_limit_calls_change_nothing(storage, twice):
    with twice():
        storage.queues.set_key_limit(QUEUE, None, concurrency=3)
        storage.queues.set_key_limit(QUEUE, "g", rate=Rate(2, DELAY), weight=2)
        ids = enqueue_many(storage, 5, concurrency_key="g")
        claimed = claim(storage, 9)
        assert [one.id for one in claimed] == ids[:2]
        assert finish(storage, releasing(claimed[0])) == [True]
        storage.jobs.cancel(QUEUE, ids[:1])
    assert counts(storage) == {State.ACTIVE: 1, State.CANCELLED: 1, State.WAITING: 3}

    storage._roundtrips._clock = AheadClock(DELAY)
    with twice():
        storage.sweep()  # the lease of the other one is over, too
        # The other one has a stall by now, and is claimed alone.
        assert [claim_ids(storage, 9) for _ in range(3)] == [ids[1:2], ids[2:3], []]
        storage.queues.set_key_limit(QUEUE, "g", rate=None)

    assert storage.queues.key_limits(QUEUE) == {None: KeyLimit(3), "g": KeyLimit(weight=2)}
    assert counts(storage) == {State.ACTIVE: 2, State.WAITING: 2}
    assert claim_ids(storage, 9) == ids[3:4]


def test_repeated_obliterate_changes_nothing(storage, twice):
    a_completed_job(storage)
    a_waiting_job(storage)

    with twice():
        removed = storage.queues.obliterate(QUEUE)

    assert removed == 2
    assert storage.queues.names() == []
    assert counts(storage) == {}


@across_masters
def test_repeated_move_changes_nothing(storage, twice):
    enqueue_many(storage, 2)
    a_delayed_job(storage, id="delayed")

    with twice():
        moved = storage.jobs.move(QUEUE, ["delayed", "unknown"], "elsewhere")

    assert moved == ["moved", "not_found"]
    assert (counts(storage), counts(storage, "elsewhere")) == ({State.WAITING: 2}, {State.DELAYED: 1})


def test_repeated_sweep_changes_nothing(storage, twice):
    an_active_job(storage, id="lost")
    a_waiting_job(storage, id="expired", ttl=5)
    a_delayed_job(storage, id="due")
    storage._roundtrips._clock = AheadClock(DELAY)

    with twice():
        swept = storage.sweep()

    assert (swept.promoted, swept.stalled, swept.expired) == (1, 1, 1)
    assert counts(storage) == {State.WAITING: 2, State.FAILED: 1}


async def test_repeated_async_enqueue_changes_nothing(storage, snapshot, monkeypatch):
    enqueue(storage)
    exchange = storage._roundtrips._exchange
    monkeypatch.setattr(exchange, "aask", AsyncTwice(exchange.aask, snapshot))

    plain = await storage.aenqueue([batch(3)])
    given = await storage.aenqueue([batch(ids=["a", "b"], unique_key="key")])

    assert [result.status for result in plain + given] == ["queued"] * 4 + ["duplicate"]
    assert counts(storage) == {State.WAITING: 5}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_repeated_async_finish_and_claim_changes_nothing(storage, snapshot, monkeypatch, ending):
    held = an_active_job(storage, id="held")
    enqueue_many(storage, 5)
    exchange = storage._roundtrips._exchange
    monkeypatch.setattr(exchange, "aask", AsyncTwice(exchange.aask, snapshot))

    ended = await storage.afinish([ENDINGS[ending](held)], request(3))
    again = await storage.afinish(list(map(completing, ended.claims.jobs)))

    assert ended.accepted == [True]
    assert again.accepted == [True] * 3


class Choking:
    """A connection that breaks instead of giving one of its answers."""

    def __init__(self, connection, answers):
        self._connection = connection
        self._left = answers

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def read_response(self, *args, **kwargs):
        answer = self._connection.read_response(*args, **kwargs)
        self._left -= 1
        if self._left < 0:
            raise redis.ConnectionError(LOST)
        return answer


@pytest.mark.parametrize("answered", range(4))
def test_many_batches_take_effect_once_when_the_connection_breaks(redis_options, monkeypatch, answered):
    with closing(RedisStorage(**redis_options)) as storage:
        batches = [batch(ids=[f"{number}-{at}" for at in range(3)]) for number in range(5)]
        enqueue(storage, id="0-1")
        lives = iter([99, answered])  # of the connection for the first call, and of that for all others
        whole = storage._roundtrips._exchange.connection

        @contextmanager
        def choking():
            with whole() as connection:
                yield Choking(connection, next(lives, 99))

        with monkeypatch.context() as patches:
            patches.setattr(storage._roundtrips._exchange, "connection", choking)
            results = storage.enqueue(batches)

        assert [result.status for result in results] == ["queued", "duplicate"] + ["queued"] * 13
        assert counts(storage) == {State.WAITING: 15}
        assert len(claim_ids(storage, 20)) == 15


def test_request_arriving_after_the_next_of_its_sequence_is_rejected(redis_options, monkeypatch):
    """Its first sending was held up somewhere; the second was answered, and the caller went on."""
    with closing(RedisStorage(**redis_options)) as storage:
        sent = []
        ask = storage._roundtrips._exchange.ask

        def recorded(words):
            sent.append(words)
            return ask(words)

        enqueue(storage, id="first")
        with monkeypatch.context() as patches:
            patches.setattr(storage._roundtrips._exchange, "ask", recorded)
            storage.enqueue([batch(2)])
            storage.queues.pause(QUEUE)

        with pytest.raises(redis.ResponseError, match="LATE"):
            ask(next(words for words in sent if words[0].startswith(b"EVAL")))

        assert counts(storage) == {State.WAITING: 3}


def test_repeated_finish_and_claim_in_a_plain_queue_changes_nothing(storage, twice):
    ids = enqueue_many(storage, 12)
    [first] = storage.claim(request(1)).jobs

    with twice():
        second = storage.finish([completing(first)], request(1))
        third = storage.finish(list(map(completing, second.claims.jobs)), request(2))
        rejected = storage.finish([completing(first)], request(1))
        last = storage.finish(list(map(completing, third.claims.jobs)), None)

    assert [second.accepted, third.accepted, rejected.accepted, last.accepted] == [
        [True],
        [True],
        [False],
        [True] * 2,
    ]
    claimed = [job.id for found in (second, third, rejected) for job in found.claims.jobs]
    assert [first.id, *claimed] == ids[:5]
    assert claim_ids(storage, 20) == ids[5:]


def test_late_request_in_a_plain_queue_claims_nothing(storage, monkeypatch):
    """Its first sending was held up somewhere; the second was answered, and the caller went on."""
    enqueue_many(storage, 12)
    [held] = storage.claim(request(1)).jobs
    sent = []
    ask = storage._roundtrips._exchange.ask

    def recorded(words):
        sent.append(words)
        return ask(words)

    with monkeypatch.context() as patches:
        patches.setattr(storage._roundtrips._exchange, "ask", recorded)
        for _ in range(2):
            [held] = storage.finish([completing(held)], request(1)).claims.jobs
        storage.queues.pause(QUEUE)
        storage.finish([completing(held)], request(1))
    storage.queues.resume(QUEUE)
    before = counts(storage)

    plain = script("finish_and_claim_plain")
    *earlier, last = [words for words in sent if words[1] in (plain.text, plain.sha)]
    for words in earlier:
        with pytest.raises(redis.ResponseError, match="LATE"):
            ask(words)
    assert len(earlier) == 2
    assert ask(last) == b"f"
    assert counts(storage) == before


def test_repeated_finish_writes_one_dead_letter(storage, twice):
    held = an_active_job(storage, id="held")

    with twice():
        accepted = finish(storage, failing(held, "handler_unknown"), failing(held))

    assert accepted == [True, False]
    [letter] = storage.reads.dead_letters(QUEUE)
    assert letter.id == "held"
