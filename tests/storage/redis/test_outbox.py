"""Messages between queues arrive once, whichever process dies between any two of its commands."""

from contextlib import closing
from itertools import count

import pytest
import redis
from msgpack import packb

from djqueue.core.states import State
from djqueue.storage.redis import keyspace
from djqueue.storage.redis.keys import MOVING_KEYS
from djqueue.testing.factories import (
    DELAY,
    a_cancelled_job,
    a_completed_job,
    a_delayed_job,
    a_failed_job,
    an_active_job,
    batch,
    cancelling,
    claim,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    failing,
    finish,
    job,
    releasing,
    report_of,
    retrying,
    state,
)
from djqueue.testing.waiting import together
from tests.clocks import AheadClock

from .mortal import Death, Place

NEAR, FAR, THIRD = "near", "far", "emails"
"""Of a cluster's three servers, each has one."""

GIVEN = 8
"""Commands of a move until the job has left: two look for what is in its way, one for a restore, one for the
mode of the other queue, two list that, one notes its mode."""


def until_given(place):
    """On one server, the last two looks go together."""
    return GIVEN if place.storage()._roundtrips._connections.is_cluster else GIVEN - 1


STORED = 6
"""Commands of an enqueue until the job is stored: one looks for what it waits for, one for a restore, one for
the queue's mode, two list it.
"""


@pytest.fixture(params=["redis_server", pytest.param("redis_cluster", marks=pytest.mark.thorough)])
def place(request):
    servers = request.getfixturevalue(request.param)
    servers.clean()
    with closing(Place(servers)) as made:
        yield made


across_masters = pytest.mark.parametrize("place", ["redis_server", "redis_cluster"], indirect=True)


def where(storage, job_id, *queues):
    """The queues that have the job, with its state there."""
    found = {queue: state(storage, job_id, queue) for queue in queues}
    return {queue: there for queue, there in found.items() if there is not None}


def assert_nothing_is_under_way(storage, *queues):
    for queue in queues:
        client = storage._connections.sync()
        assert client.exists(storage.keys(queue).key("outbox")) == 0


def worked_off(storage):
    """The ids of all jobs that are claimable, each of which completes, in the order of their claims."""
    done = []
    while claimed := claim(storage, 10):
        assert all(finish(storage, *map(completing, claimed)))
        done += [one.id for one in claimed]
    return done


def test_queues_of_these_tests_are_on_different_masters(redis_cluster):
    nodes = {redis_cluster.node_of(f"{{q:{queue}}}:jobs").port for queue in (NEAR, FAR, THIRD)}

    assert len(nodes) == 3


# Moves.


def pending_jobs(storage):
    enqueue(storage, queue=NEAR, id="plain")
    enqueue(storage, queue=NEAR, id="special", priority=5, unique_key="key", concurrency_key="g", ttl=DELAY)
    a_delayed_job(storage, queue=NEAR, id="delayed")
    finish(storage, retrying(claim_one(storage, queues=[NEAR]), delay=DELAY))
    return ["plain", "special", "delayed"]


@across_masters
def test_moved_job_is_in_one_queue_whenever_the_mover_dies(place):
    deaths = place.deaths(pending_jobs, lambda storage, ids: storage.jobs.move(NEAR, ids, FAR))
    outcomes = []
    for storage, ids, died in deaths:
        before = storage.reads.jobs(NEAR, ids)
        storage.sweep()

        there = [where(storage, job_id, NEAR, FAR) for job_id in ids]
        queues = {queue for found in there for queue in found}
        assert [len(found) for found in there] == [1, 1, 1]
        assert len(queues) == 1
        [queue] = queues
        outcomes.append(queue)
        assert queue in storage.queues.names()
        assert counts(storage, queue) == {State.WAITING: 1, State.DELAYED: 2}
        assert_nothing_is_under_way(storage, NEAR, FAR)
        if any(before):
            assert queue == NEAR or died
        special = job(storage, "special", queue)
        assert (special.attempts, special.failures, special.options.unique_key) == (1, 1, "key")
        assert enqueue_again(storage, queue).status == "duplicate"
        assert storage.jobs.promote(queue, ["special", "delayed"]) == [True, True]
        assert sorted(worked_off(storage)) == sorted(ids)
    assert outcomes == sorted(outcomes, reverse=True)
    assert {NEAR, FAR} == set(outcomes)


def enqueue_again(storage, queue):
    return storage.enqueue([batch(ids=["other"], queue=queue, unique_key="key")])[0]


def test_job_with_a_taken_id_returns_whenever_the_mover_dies(place):
    def prepare(storage):
        enqueue(storage, queue=NEAR, id="a", payload=b"\x01")
        enqueue(storage, queue=FAR, id="a", payload=b"\x02")

    for storage, _, _ in place.deaths(prepare, give_in_vain):
        storage.sweep()

        assert (job(storage, "a", NEAR).payload, job(storage, "a", FAR).payload) == (b"\x01", b"\x02")
        assert counts(storage, NEAR) == counts(storage, FAR) == {State.WAITING: 1}
        assert worked_off(storage) == ["a", "a"]


def give_in_vain(storage, _=None):
    """Move the job `a` as one does who has not seen, a moment ago, what is in its way."""
    heading = [b"give", FAR.encode(), 1]
    storage._keyspace.run(storage._keyspace.on_jobs("give", NEAR, ["a"], heading, MOVING_KEYS))


def test_job_with_a_taken_unique_key_returns_whenever_the_mover_dies(place):
    def prepare(storage):
        enqueue(storage, queue=THIRD, id="up")
        enqueue(storage, queue=NEAR, id="a", unique_key="key", depends_on=((THIRD, "up"),))
        enqueue(storage, queue=FAR, id="owner", unique_key="key")
        enqueue(storage, queue=FAR, id="down", depends_on=((NEAR, "a"),))

    for storage, _, _ in place.deaths(prepare, give_in_vain):
        storage.sweep()

        assert counts(storage, NEAR) == {State.BLOCKED: 1}
        assert job(storage, "down", FAR).options.depends_on == ((NEAR, "a"),)
        assert enqueue_again(storage, NEAR).id == "a"
        assert sorted(worked_off(storage)) == ["a", "down", "owner", "up"]
        assert_nothing_is_under_way(storage, NEAR, FAR, THIRD)


@pytest.mark.parametrize("maker", [a_failed_job, a_cancelled_job])
def test_moved_job_replaces_a_failed_or_cancelled_job_of_its_id(place, maker):
    storage = place.storage()
    maker(storage, queue=FAR, id="a")
    enqueue(storage, queue=NEAR, id="a")

    assert storage.jobs.move(NEAR, ["a"], FAR) == ["moved"]

    assert counts(storage, NEAR) == {}
    assert counts(storage, FAR) == {State.WAITING: 1}
    assert storage.reads.dead_letters(FAR) == []
    assert worked_off(storage) == ["a"]


def test_moved_job_has_no_result_of_its_predecessor(place):
    clock = AheadClock()
    storage = place.storage(clock=clock)
    forerunner = an_active_job(storage, queue=FAR, id="a", result_ttl=1)
    finish(storage, completing(forerunner))
    clock.advance(DELAY)
    enqueue(storage, queue=NEAR, id="a")

    assert storage.jobs.move(NEAR, ["a"], FAR) == ["moved"]

    assert counts(storage, FAR) == {State.WAITING: 1}
    assert finish(storage, completing(claim_one(storage, queues=[FAR]), None)) == [True]
    assert job(storage, "a", FAR).result is None


def test_moved_job_keeps_its_history_and_logs(place):
    storage = place.storage()
    held = an_active_job(storage, queue=NEAR, id="a")
    storage.report([report_of(held, 50, [(1, "begun"), (2, "half way")])])
    finish(storage, retrying(held))
    before = job(storage, "a", NEAR)
    enqueue(storage, queue=FAR, id="a")

    give_in_vain(storage)
    assert job(storage, "a", NEAR) == before
    assert storage.jobs.move(NEAR, ["a"], THIRD) == ["moved"]
    assert job(storage, "a", THIRD)._replace(queue=NEAR) == before
    assert len(before.history) == 1
    assert (before.progress, len(before.logs)) == (50, 2)


def a_chain(storage):
    enqueue(storage, queue=NEAR, id="up")
    enqueue(storage, queue=NEAR, id="between", depends_on=((NEAR, "up"),))
    enqueue(storage, queue=THIRD, id="down", depends_on=((NEAR, "between"),))


def test_dependents_follow_a_moved_job_whenever_the_mover_dies(place):
    for storage, _, died in place.deaths(a_chain, move_chain):
        move_chain(storage)
        storage.sweep()

        assert counts(storage, NEAR) == {}, died
        assert job(storage, "between", FAR).options.depends_on == ((FAR, "up"),)
        assert job(storage, "down", THIRD).options.depends_on == ((FAR, "between"),)
        assert worked_off(storage) == ["up", "between", "down"]
        assert_nothing_is_under_way(storage, NEAR, FAR, THIRD)


def move_chain(storage, _=None):
    storage.jobs.move(NEAR, ["up", "between"], FAR)


def a_dependent_that_nobody_knows_of_yet(place, **options):
    """A job `down` in one queue whose producer died before the other queue, with `up`, heard of it."""
    enqueue(place.storage(), queue=NEAR, id="up")
    with pytest.raises(Death):
        enqueue(place.storage(commands=STORED), queue=FAR, id="down", depends_on=((NEAR, "up"),), **options)


def test_dependent_waits_for_a_job_moved_before_the_dependency_arrived(place):
    storage = place.storage()
    a_dependent_that_nobody_knows_of_yet(place)

    assert storage.jobs.move(NEAR, ["up"], THIRD) == ["moved"]
    storage.sweep()

    assert state(storage, "down", FAR) is State.BLOCKED
    assert storage.jobs.move(THIRD, ["up"], NEAR) == ["moved"]
    assert state(storage, "down", FAR) is State.BLOCKED
    assert worked_off(storage) == ["up", "down"]
    assert_nothing_is_under_way(storage, NEAR, FAR, THIRD)


def test_dependent_follows_a_job_through_several_queues(place):
    storage = place.storage()
    a_dependent_that_nobody_knows_of_yet(place)

    for source, target in ((NEAR, THIRD), (THIRD, "orders"), ("orders", NEAR), (NEAR, "orders")):
        assert storage.jobs.move(source, ["up"], target) == ["moved"]
    storage.sweep()

    assert state(storage, "down", FAR) is State.BLOCKED
    assert worked_off(storage) == ["up", "down"]


def test_dependent_waits_for_a_job_moved_to_its_own_queue(place):
    storage = place.storage()
    a_dependent_that_nobody_knows_of_yet(place)

    assert storage.jobs.move(NEAR, ["up"], FAR) == ["moved"]
    storage.sweep()

    assert worked_off(storage) == ["up", "down"]


def test_dependent_follows_a_moved_job_whenever_the_maintainer_dies(place):
    def prepare(storage):
        a_dependent_that_nobody_knows_of_yet(place)

    for storage, _, died in place.deaths(prepare, follow):
        follow(storage)

        assert state(storage, "down", FAR) is State.BLOCKED, died
        assert worked_off(storage) == ["up", "down"]
        assert_nothing_is_under_way(storage, NEAR, FAR, THIRD)


def follow(storage, _=None):
    storage.jobs.move(NEAR, ["up"], THIRD)
    storage.sweep()


@pytest.mark.parametrize("forget", ["cancel", "remove"])
def test_dependent_of_a_moved_and_deleted_job_fails(place, forget):
    storage = place.storage()
    a_dependent_that_nobody_knows_of_yet(place)

    assert storage.jobs.move(NEAR, ["up"], THIRD) == ["moved"]
    getattr(storage.jobs, forget)(THIRD, ["up"])
    storage.sweep()

    assert counts(storage, FAR) == {State.FAILED: 1}
    assert "a dependency in another queue" in job(storage, "down", FAR).error.message


def test_cancelled_dependent_does_not_prevent_another_move(place):
    storage = place.storage()
    a_dependent_that_nobody_knows_of_yet(place)

    assert storage.jobs.move(NEAR, ["up"], THIRD) == ["moved"]
    storage.sweep()
    storage.jobs.cancel(FAR, ["down"])

    assert storage.jobs.move(THIRD, ["up"], NEAR) == ["moved"]


def test_outbox_delivers_a_job_before_the_updates_of_its_dependents():
    """Though what is for one queue is brought together, and something for the dependent's is older."""
    ended, given, moved, later = ["ended", "x"], ["job", "up"], ["moved", "up"], ["ended", "y"]
    told = enumerate([(FAR, ended), (THIRD, given), (FAR, ended), (FAR, moved), (THIRD, given), (FAR, later)])
    messages = [packb([str(number), queue, packb(what)]) for number, (queue, what) in told]

    found = [(queue, [int(number) for number in told[::2]]) for queue, told in keyspace._by_target(messages)]

    assert found == [(FAR, [0, 2]), (THIRD, [1]), (FAR, [3, 5]), (THIRD, [4])]


def test_outbox_delivers_earlier_messages_before_a_moved_job():
    """Else what it says from where it is then would be overtaken by that."""
    ended, waits, given = ["ended", "x"], ["await", "up"], ["job", "down"]
    told = enumerate([(FAR, ended), (THIRD, waits), (FAR, given), (FAR, given), (THIRD, waits)])
    messages = [packb([str(number), queue, packb(what)]) for number, (queue, what) in told]

    found = [(queue, [int(number) for number in told[::2]]) for queue, told in keyspace._by_target(messages)]

    assert found == [(FAR, [0]), (THIRD, [1]), (FAR, [2, 3]), (THIRD, [4])]


@across_masters
def test_move_completes_when_maintainers_die_one_after_another(place):
    storage = place.storage()
    ids = enqueue_many(storage, 3, queue=NEAR)
    with pytest.raises(Death):
        place.storage(commands=until_given(place)).jobs.move(NEAR, ids, FAR)
    assert counts(storage, NEAR) == counts(storage, FAR) == {}

    for commands in count(1):
        try:
            place.storage(commands=commands).sweep()
        except Death:
            continue
        break

    assert counts(storage, FAR) == {State.WAITING: 3}
    assert worked_off(storage) == ids


def test_concurrent_maintainers_move_each_job_once(place):
    storage = place.storage()
    ids = enqueue_many(storage, 150, queue=NEAR)
    with pytest.raises(Death):
        place.storage(commands=until_given(place)).jobs.move(NEAR, ids, FAR)

    together([place.storage().sweep for _ in range(4)])

    assert counts(storage, FAR) == {State.WAITING: 150}
    assert worked_off(storage) == ids


def test_message_is_accepted_after_its_sender_lost_the_last_numbers(place):
    """As a failover does to one server of a cluster, whose replica had not heard of all of them yet."""
    storage = place.storage()
    [first, second] = enqueue_many(storage, 2, queue=NEAR)
    client = storage._connections.sync()
    enqueue_many(storage, 1, queue=THIRD)
    earlier = client.hget(storage.keys(NEAR).key("meta"), "sent")
    assert storage.jobs.move(NEAR, [first], FAR) == ["moved"]
    client.hdel(storage.keys(NEAR).key("meta"), "sent")
    if earlier is not None:
        client.hset(storage.keys(NEAR).key("meta"), "sent", earlier)

    assert storage.jobs.move(NEAR, [second], FAR) == ["moved"]

    assert counts(storage, FAR) == {State.WAITING: 2}


# Dependencies.


def held_upstream(storage):
    """The claim of a job of one queue for which two others wait, each in a queue of its own."""
    held = an_active_job(storage, queue=NEAR, id="up")
    for queue in (NEAR, FAR, THIRD):
        enqueue(storage, queue=queue, id=f"down-{queue}", depends_on=((NEAR, "up"),))
    return held


def dependents(storage):
    return [state(storage, f"down-{queue}", queue) for queue in (NEAR, FAR, THIRD)]


@pytest.mark.parametrize(
    ("ending", "becomes"),
    [
        (completing, State.WAITING),
        (failing, State.FAILED),
        (cancelling, State.FAILED),
    ],
)
def test_dependents_learn_of_a_finish_whenever_the_worker_dies(place, ending, becomes):
    for storage, held, died in place.deaths(
        held_upstream, lambda storage, held: finish(storage, ending(held))
    ):
        storage.sweep()

        is_active = died and state(storage, "up", NEAR) is State.ACTIVE
        assert finish(storage, ending(held)) == [is_active]
        assert dependents(storage) == [becomes] * 3, died
        assert_nothing_is_under_way(storage, NEAR, FAR, THIRD)
        if becomes is State.WAITING:
            assert sorted(worked_off(storage)) == [f"down-{queue}" for queue in (THIRD, FAR, NEAR)]
        else:
            assert len(storage.reads.dead_letters(FAR)) == 1
            assert counts(storage, FAR) == {State.FAILED: 1}


def test_dependent_waits_for_its_dependencies_whenever_its_producer_dies(place):
    def prepare(storage):
        return [an_active_job(storage, queue=queue, id="up") for queue in (NEAR, THIRD)]

    def act(storage, _):
        enqueue(storage, queue=FAR, id="down", depends_on=((NEAR, "up"), (THIRD, "up")))

    for storage, held, died in place.deaths(prepare, act):
        storage.sweep()

        there = state(storage, "down", FAR)
        assert there is State.BLOCKED or (died and there is None)
        assert finish(storage, completing(held[0])) == [True]
        assert state(storage, "down", FAR) is there
        assert finish(storage, completing(held[1])) == [True]
        assert worked_off(storage) == (["down"] if there else [])


@pytest.mark.parametrize(
    ("forget", "left"),
    [
        (lambda storage: storage.jobs.cancel(NEAR, ["up"]), {State.CANCELLED: 1}),
        (lambda storage: storage.jobs.remove(NEAR, ["up"]), {}),
        (lambda storage: storage.queues.obliterate(NEAR), {}),
    ],
    ids=["cancel", "remove", "obliterate"],
)
def test_dependent_of_a_deleted_job_fails_whenever_the_caller_dies(place, forget, left):
    def prepare(storage):
        enqueue(storage, queue=NEAR, id="up")
        enqueue(storage, queue=FAR, id="down", depends_on=((NEAR, "up"),))

    for storage, _, died in place.deaths(prepare, lambda storage, _: forget(storage)):
        storage.sweep()

        if died and state(storage, "up", NEAR) is State.WAITING:
            forget(storage)
        assert counts(storage, NEAR) == left
        assert counts(storage, FAR) == {State.FAILED: 1}
        assert job(storage, "down", FAR).reason == "dependency_failed"
        assert_nothing_is_under_way(storage, NEAR, FAR)


def test_cancelled_dependent_leaves_no_dependency_behind(place):
    def prepare(storage):
        held = an_active_job(storage, queue=NEAR, id="up")
        enqueue(storage, queue=FAR, id="down", depends_on=((NEAR, "up"),))
        return held

    for storage, held, died in place.deaths(prepare, lambda storage, _: storage.jobs.cancel(FAR, ["down"])):
        storage.sweep()

        if died and state(storage, "down", FAR) is State.BLOCKED:
            storage.jobs.cancel(FAR, ["down"])
        assert finish(storage, completing(held)) == [True]
        assert counts(storage, FAR) == {State.CANCELLED: 1}
        client = storage._connections.sync()
        assert client.exists(storage.keys(NEAR).key("deps")) == 0
        assert client.exists(storage.keys(FAR).key("unmet")) == 0


@across_masters
def test_released_job_unblocks_no_dependents(place):
    storage = place.storage()
    held = held_upstream(storage)

    assert finish(storage, releasing(held)) == [True]

    assert dependents(storage) == [State.BLOCKED] * 3
    assert len(worked_off(storage)) == 4


@across_masters
def test_finish_unblocks_more_dependents_than_fit_into_one_message(place):
    storage = place.storage()
    held = an_active_job(storage, queue=NEAR, id="up")
    enqueue_many(storage, 1_200, queue=FAR, depends_on=((NEAR, "up"),))

    with pytest.raises(Death):
        finish(place.storage(commands=4), completing(held))
    storage.sweep()

    assert counts(storage, FAR) == {State.WAITING: 1_200}


# What an obliterated queue leaves.


def test_deleting_obliterated_jobs_keeps_results_of_new_jobs_with_their_ids(place):
    def prepare(storage):
        a_completed_job(storage, queue=NEAR, id="a", result=b"\x01")
        finish(storage, failing(an_active_job(storage, queue=NEAR, id="b")))

    for storage, _, died in place.deaths(prepare, lambda storage, _: storage.queues.obliterate(NEAR)):
        if died and state(storage, "a", NEAR):
            storage.queues.obliterate(NEAR)
        a_completed_job(storage, queue=NEAR, id="a", result=b"\x02")
        finish(storage, completing(an_active_job(storage, queue=NEAR, id="b"), None))
        storage.sweep()

        assert job(storage, "a", NEAR).result == b"\x02"
        assert job(storage, "b", NEAR).result is None
        assert job(storage, "b", NEAR).logs == ()


def test_obliterated_queues_leave_no_keys_without_expiry(place):
    storage = place.storage()
    held_upstream(storage)
    storage.jobs.move(FAR, [enqueue(storage, queue=FAR)], THIRD)
    for queue in (NEAR, FAR, THIRD):
        storage.queues.obliterate(queue, force=True)
    storage.sweep()

    assert storage.queues.names() == []
    nodes = getattr(place.servers, "nodes", [place.servers])
    left = {}
    for node in nodes:
        with redis.Redis(port=node.port, protocol=2) as client:
            left.update({key: client.pttl(key) for key in client.scan_iter()})
    assert [key for key, lasts in left.items() if lasts < 0] == []
    assert {key.split(b":")[2] for key in left} <= {b"sequence", b"inbox", b"m", b"version"}


def test_inbox_of_a_queue_in_use_does_not_expire(place):
    storage = place.storage()
    for _ in range(2):
        storage.jobs.move(NEAR, [enqueue(storage, queue=NEAR)], FAR)
        storage.queues.obliterate(FAR)
    storage.jobs.move(NEAR, [enqueue(storage, queue=NEAR)], FAR)

    assert storage._connections.sync().pttl(storage.keys(FAR).key("inbox")) == -1
    assert counts(storage, FAR) == {State.WAITING: 1}


# Dead letters that are moved.


def dead_jobs(storage):
    for job_id in ("plain", "special"):
        held = an_active_job(storage, queue=NEAR, id=job_id, unique_key=job_id)
        storage.report([report_of(held, 50, [(1, "begun")])])
        finish(storage, failing(held))
    return storage.reads.dead_letters(NEAR)


def test_moved_dead_letter_is_in_one_queue_whenever_the_mover_dies(place):
    outcomes = []
    ids = ["plain", "special"]
    for storage, letters, died in place.deaths(
        dead_jobs, lambda storage, _: storage.jobs.move(NEAR, ids, FAR)
    ):
        storage.sweep()

        found = {queue for job_id in ids for queue in where(storage, job_id, NEAR, FAR)}
        assert len(found) == 1
        [queue] = found
        outcomes.append(queue)
        assert queue == FAR or died
        assert queue in storage.queues.names()
        assert counts(storage, queue) == {State.FAILED: 2}
        assert storage.reads.dead_letters(queue) == [letter._replace(queue=queue) for letter in letters]
        assert job(storage, "special", queue).progress == 50
        assert_nothing_is_under_way(storage, NEAR, FAR)
        assert storage.jobs.retry(queue, ids) == ["retried", "retried"]
        assert sorted(worked_off(storage)) == ids
    assert outcomes == sorted(outcomes, reverse=True)
    assert {NEAR, FAR} == set(outcomes)


def test_dead_letter_with_a_taken_id_returns_whenever_the_mover_dies(place):
    def prepare(storage):
        a_failed_job(storage, queue=NEAR, id="a")
        a_completed_job(storage, queue=FAR, id="a")
        enqueue(storage, queue=THIRD, id="down", depends_on=((NEAR, "a"),), on_dependency_failure="wait")
        return storage.reads.dead_letters(NEAR)

    for storage, letters, _ in place.deaths(prepare, give_in_vain):
        storage.sweep()

        assert storage.reads.dead_letters(NEAR) == letters
        assert counts(storage, FAR) == {State.COMPLETED: 1}
        assert job(storage, "down", THIRD).options.depends_on == ((NEAR, "a"),)
        assert storage.jobs.retry(NEAR, ["a"]) == ["retried"]
        assert worked_off(storage) == ["a", "down"]
        assert_nothing_is_under_way(storage, NEAR, FAR, THIRD)


# Records that are kept for others.

BRIEF = 10_000
A_DAY = 86_400_000


def kept(storage, queue):
    """Which records of a queue are there when their own time is over, and what is noted of them."""
    client = storage._connections.sync()
    keys = storage.keys(queue)
    return (
        counts(storage, queue).get(State.COMPLETED, 0),
        client.zcard(keys.key("holds")),
        int(client.hget(keys.key("meta"), "hc") or 0),
    )


def assert_nothing_is_kept(storage, *queues):
    client = storage._connections.sync()
    for queue in queues:
        keys = storage.keys(queue)
        assert counts(storage, queue).get(State.COMPLETED, 0) == 0
        for name in ("holds", "needs", "finished", "deps", "unmet", "outbox"):
            assert client.exists(keys.key(name)) == 0, (queue, name)


def children_of_one(storage):
    for queue in (NEAR, FAR):
        enqueue(storage, queue=queue, id="child", result_ttl=BRIEF)
    needs = ((NEAR, "child"), (FAR, "child"))
    enqueue(storage, queue=THIRD, id="parent", result_ttl=BRIEF, depends_on=needs)
    return claim(storage, 2)


def pass_brief(storage, clock):
    storage.sweep()
    clock.advance(BRIEF + 1)
    storage.sweep()
    storage.sweep()


@pytest.fixture
def timed(place):
    place.clock = AheadClock()
    return place


def test_children_stay_pinned_whenever_their_worker_dies(timed):
    def act(storage, claimed):
        finish(storage, *map(completing, claimed))

    for storage, claimed, died in timed.deaths(children_of_one, act):
        accepted = finish(storage, *map(completing, claimed))
        assert died or accepted == [False, False]
        for _ in range(2):
            pass_brief(storage, timed.clock)
            assert kept(storage, NEAR) == kept(storage, FAR) == (1, 1, 1), died

        assert worked_off(storage) == ["parent"]
        pass_brief(storage, timed.clock)
        assert_nothing_is_kept(storage, NEAR, FAR, THIRD)


@pytest.mark.parametrize("end", ["complete", "cancel", "remove", "obliterate", "clean"])
def test_pinned_children_are_released_whenever_the_process_that_ends_the_parent_dies(timed, end):
    def prepare(storage):
        finish(storage, *map(completing, children_of_one(storage)))
        return claim(storage, 1) if end == "complete" else []

    def act(storage, claimed):
        if claimed:
            finish(storage, *map(completing, claimed))
        elif end == "obliterate":
            storage.queues.obliterate(THIRD)
        elif end == "clean":
            storage.queues.clean(THIRD, frozenset({State.WAITING}), 2**53)
        else:
            getattr(storage.jobs, end)(THIRD, ["parent"])

    for storage, claimed, _ in timed.deaths(prepare, act):
        pass_brief(storage, timed.clock)
        act(storage, claimed)
        pass_brief(storage, timed.clock)

        assert_nothing_is_kept(storage, NEAR, FAR, THIRD)


def test_child_of_a_late_parent_is_pinned_whenever_the_producer_dies(timed):
    def prepare(storage):
        a_completed_job(storage, queue=NEAR, id="child", result_ttl=BRIEF)

    def act(storage, _):
        enqueue(storage, queue=THIRD, id="parent", result_ttl=BRIEF, depends_on=((NEAR, "child"),))

    for storage, _, died in timed.deaths(prepare, act):
        there = state(storage, "parent", THIRD) is not None
        assert there or died
        storage._keyspace.run(storage._keyspace.deliver(THIRD))
        pass_brief(storage, timed.clock)

        assert kept(storage, NEAR) == ((1, 1, 1) if there else (0, 0, 0))
        assert worked_off(storage) == (["parent"] if there else [])
        pass_brief(storage, timed.clock)
        assert_nothing_is_kept(storage, NEAR, THIRD)


@pytest.mark.parametrize("unmet", [True, False], ids=["blocked", "waiting"])
def test_children_of_a_moved_parent_stay_pinned_whenever_the_mover_dies(timed, unmet):
    def prepare(storage):
        near, far = sorted(children_of_one(storage), key=lambda one: one.queue == FAR)
        finish(storage, completing(near))
        if not unmet:
            finish(storage, completing(far))
        return [far] if unmet else []

    for storage, left, died in timed.deaths(
        prepare, lambda storage, _: storage.jobs.move(THIRD, ["parent"], "x")
    ):
        pass_brief(storage, timed.clock)
        assert kept(storage, NEAR) == (1, 1, 1), died
        finish(storage, *map(completing, left))
        pass_brief(storage, timed.clock)
        assert kept(storage, NEAR) == kept(storage, FAR) == (1, 1, 1), died

        assert worked_off(storage) == ["parent"]
        pass_brief(storage, timed.clock)
        assert_nothing_is_kept(storage, NEAR, FAR, THIRD, "x")


def give_parent_in_vain(storage, _=None):
    heading = [b"give", FAR.encode(), 1]
    storage._keyspace.run(storage._keyspace.on_jobs("give", THIRD, ["parent"], heading, MOVING_KEYS))


def test_children_of_a_returned_parent_stay_pinned_whenever_the_mover_dies(timed):
    def prepare(storage):
        finish(storage, *map(completing, children_of_one(storage)))
        enqueue(storage, queue=FAR, id="parent", delay=DELAY)

    for storage, _, died in timed.deaths(prepare, give_parent_in_vain):
        pass_brief(storage, timed.clock)
        assert kept(storage, NEAR) == kept(storage, FAR) == (1, 1, 1), died

        assert worked_off(storage) == ["parent"]
        storage.jobs.cancel(FAR, ["parent"])
        storage.queues.clean(FAR, frozenset({State.CANCELLED}), 2**53)
        pass_brief(storage, timed.clock)
        assert_nothing_is_kept(storage, NEAR, FAR, THIRD)


def test_child_is_unpinned_after_the_last_message_of_its_parent_was_lost(timed):
    storage = timed.storage()
    finish(storage, *map(completing, children_of_one(storage)))
    with pytest.raises(Death):
        timed.storage(commands=1).jobs.remove(THIRD, ["parent"])
    storage._connections.sync().delete(storage.keys(THIRD).key("outbox"))
    pass_brief(storage, timed.clock)
    assert kept(storage, NEAR) == (1, 1, 1)

    timed.clock.advance(A_DAY)
    pass_brief(storage, timed.clock)

    assert_nothing_is_kept(storage, NEAR, FAR, THIRD)


def test_pinned_child_without_a_known_parent_is_unpinned(timed):
    storage = timed.storage()
    finish(storage, *map(completing, children_of_one(storage)))
    storage._connections.sync().delete(storage.keys(NEAR).key("holds"))
    pass_brief(storage, timed.clock)
    assert kept(storage, NEAR) == (1, 0, 1)

    timed.clock.advance(A_DAY)
    pass_brief(storage, timed.clock)

    assert counts(storage, NEAR) == {}
    assert kept(storage, FAR) == (1, 1, 1)


def test_children_stay_pinned_while_their_parent_waits_for_days(timed):
    storage = timed.storage()
    finish(storage, *map(completing, children_of_one(storage)))

    for _ in range(5):
        timed.clock.advance(A_DAY + 1)
        pass_brief(storage, timed.clock)
        assert kept(storage, NEAR) == kept(storage, FAR) == (1, 1, 1)

    assert worked_off(storage) == ["parent"]
    pass_brief(storage, timed.clock)
    assert_nothing_is_kept(storage, NEAR, FAR, THIRD)


def test_result_of_a_pinned_job_does_not_expire_in_redis(place):
    storage = place.storage()
    client = storage._connections.sync()
    key = storage.keys(NEAR).result("child")
    finish(storage, *map(completing, children_of_one(storage)))
    assert client.pttl(key) == -1

    storage.jobs.cancel(THIRD, ["parent"])
    assert client.pttl(key) <= BRIEF

    a_completed_job(storage, queue=NEAR, id="late", result_ttl=DELAY)
    key = storage.keys(NEAR).result("late")
    assert 0 < client.pttl(key) <= DELAY
    enqueue(storage, queue=THIRD, id="parent", depends_on=((NEAR, "late"),))
    assert client.pttl(key) == -1
    storage.jobs.cancel(THIRD, ["parent"])
    assert 0 < client.pttl(key) <= DELAY
