"""Bulk enqueues on Redis: each call is sent while the previous one is in flight."""

import itertools
from threading import Thread

import pytest
import redis

from djqueue.client import Queue
from djqueue.core.errors import QueueFullError, StorageUnavailableError
from djqueue.core.policies import QueuePolicy
from djqueue.storage.redis import RedisStorage
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import QUEUE, batch, claim_ids, counts, enqueue, state
from tests.clocks import AheadClock
from tests.proxies import ANSWERS, REQUESTS, LossyProxy
from tests.support import eventually

CHUNK = 1_000


@pytest.fixture
def open_storage(redis_options):
    made = []

    def make(**given):
        made.append(RedisStorage(**{**redis_options, **given}))
        return made[-1]

    yield make
    for storage in made:
        storage.close()


@pytest.fixture
def storage(open_storage):
    return open_storage()


def batches(count, size=10, **options):
    return [batch(size, payloads=[b"%d" % n] * size, **options) for n in range(count)]


def ids_of(pairs):
    return [result.id for _, results in pairs for result in results]


def waiting_ids(server):
    """Return the ids of the waiting jobs in the order in which they will run."""
    with redis.Redis.from_url(server.url) as client:
        return [entry[8:].decode() for entry in client.lrange(f"{{q:{QUEUE}}}:w", 0, -1)]


def sent_before(storage, number):
    """Return how many batches have been yielded when each of `number` batches is taken."""
    yielded, seen = [], []

    def source():
        for one in batches(number):
            seen.append(len(yielded))
            yield one

    for pair in storage.enqueue_each(source()):
        yielded.append(pair)
    return seen


def test_batches_are_enqueued_in_order(storage, redis_server):
    ids = []
    for _ in range(2):  # the queue is new the first time
        ids += ids_of(storage.enqueue_each(batches(7)))

    assert len(set(ids)) == 140
    assert waiting_ids(redis_server) == ids


def test_next_batch_is_read_while_earlier_batches_are_in_flight(storage):
    enqueue(storage)

    seen = sent_before(storage, 8)

    # Two are in flight, and a third one is ready to be sent.
    assert [index - before for index, before in enumerate(seen)] == [0, 1, 2, 2, 2, 2, 2, 2]


def test_batches_with_other_options_keep_their_order(storage, redis_server):
    enqueue(storage, id="a")
    given = [*batches(2), batch(ids=["b", "a"]), *batches(2), batch(1_500), batch(depends_on=((QUEUE, "a"),))]

    pairs = list(storage.enqueue_each(given))

    assert [pair[0] for pair in pairs] == given
    assert [result.status for result in pairs[2][1]] == ["queued", "duplicate"]
    plain = [one for one in ids_of(pairs[:-1]) if one != "a"]
    assert waiting_ids(redis_server) == ["a", *plain]
    assert state(storage, pairs[-1][1][0].id) == "blocked"


def test_bounded_queue_accepts_batches_one_at_a_time(open_storage):
    storage = open_storage(policies={QUEUE: QueuePolicy(max_size=25)})
    done = []

    with pytest.raises(QueueFullError):
        done.extend(storage.enqueue_each([*batches(3), *batches(1, 5)]))

    assert len(done) == 2
    assert counts(storage) == {"waiting": 20}  # the small batch was not sent, although there is room for it


def test_batches_before_an_error_of_the_iterable_are_enqueued_and_yielded(storage, redis_server):
    enqueue(storage, id="first")

    def source():
        yield from batches(3)
        raise LookupError("no more")

    done = []
    with pytest.raises(LookupError, match="no more"):
        done.extend(storage.enqueue_each(source()))

    assert waiting_ids(redis_server) == ["first", *ids_of(done)]
    assert len(done) == 3
    assert enqueue(storage, id="next") == "next"


def test_storage_works_after_a_caller_abandons_a_bulk_enqueue(storage, redis_server):
    enqueue(storage)
    pairs = storage.enqueue_each(batches(9))
    next(pairs)
    pairs.close()

    assert enqueue(storage, id="next") == "next"
    assert claim_ids(storage, 500)[-1] == "next"


def test_interrupted_wait_leaves_no_reply_for_the_next_call(storage, monkeypatch):
    enqueue(storage)
    connection = storage._roundtrips._exchange._spare[-1][1]
    read, reads = connection.read_response, itertools.count()

    def interrupted(*args, **kwargs):
        if next(reads) == 2:
            raise KeyboardInterrupt
        return read(*args, **kwargs)

    monkeypatch.setattr(connection, "read_response", interrupted)
    done = []
    with pytest.raises(KeyboardInterrupt):
        done.extend(storage.enqueue_each(batches(9)))

    assert len(done) == 2
    assert enqueue(storage, id="next") == "next"
    assert [len(ids_of([pair])) for pair in storage.enqueue_each(batches(3))] == [10, 10, 10]


def test_bulk_enqueue_lists_an_obliterated_queue_again(open_storage, storage, redis_server):
    enqueue(storage)
    open_storage(clock=AheadClock(0)).queues.obliterate(QUEUE)

    ids = ids_of(storage.enqueue_each(batches(4)))

    assert sorted(waiting_ids(redis_server)) == sorted(ids)
    assert storage.queues.names() == [QUEUE]


def test_bulk_enqueue_loads_flushed_scripts_again(storage, redis_server):
    enqueue(storage)

    def source():
        for one in batches(6):
            redis_server.run("SCRIPT", "FLUSH")
            yield one

    assert sorted(ids_of(storage.enqueue_each(source()))) == sorted(waiting_ids(redis_server)[1:])


@pytest.mark.parametrize("direction", [ANSWERS, REQUESTS])
@pytest.mark.parametrize("place", [0.1, 0.35, 0.5, 0.65, 0.8, 0.95])
def test_calls_on_a_lost_connection_take_effect_once(redis_server, open_storage, direction, place):
    with LossyProxy(redis_server.port) as proxy:
        storage = open_storage(URL=proxy.url)
        enqueue(storage)
        begin = proxy.passed[direction]
        list(storage.enqueue_each(batches(10, 100)))
        size = proxy.passed[direction] - begin
    redis_server.clean()
    cut = begin + int(place * size)
    with LossyProxy(redis_server.port, **{direction: [cut, cut + size // 4]}) as proxy:
        storage = open_storage(URL=proxy.url)
        first = enqueue(storage)
        ids = ids_of(storage.enqueue_each(batches(10, 100)))
        assert proxy.made >= 1

    assert len(set(ids)) == 1_000
    assert waiting_ids(redis_server) == [first, *ids]


def test_bulk_enqueue_reports_the_enqueued_jobs_when_the_server_is_killed(redis_server, open_storage):
    storage = open_storage(TIMEOUT=4)
    queue = Queue(QUEUE, storage=storage)
    queue.enqueue(0)

    def payloads():
        for number in range(10 * CHUNK):
            if number == 5 * CHUNK:
                redis_server.stop()
            yield number

    try:
        with pytest.raises(StorageUnavailableError) as caught:
            queue.enqueue_many(payloads())
    finally:
        redis_server.ensure_running()

    # The replies of the last two calls were in the socket, or are lost.
    [note] = caught.value.__notes__
    assert note.startswith(("The first 3,000 jobs", "The first 4,000 jobs", "The first 5,000 jobs"))
    assert queue.enqueue(1).status == "queued"


def test_bulk_enqueue_survives_killed_connections(redis_server, open_storage):
    queue = Queue(QUEUE, storage=open_storage())
    queue.enqueue(0)

    def payloads():
        for number in range(6 * CHUNK):
            if number == 3 * CHUNK:
                redis_server.run("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            yield number

    results = queue.enqueue_many(payloads())

    assert [result.status for result in results] == ["queued"] * 6 * CHUNK
    assert waiting_ids(redis_server)[1:] == [result.id for result in results]


def test_threads_make_bulk_enqueues_concurrently(storage, redis_server):
    enqueue(storage, id="first")
    found = []
    threads = [
        Thread(target=lambda: found.extend(ids_of(storage.enqueue_each(batches(10))))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(waiting_ids(redis_server)) == sorted(["first", *found])


def test_subscription_begins_with_the_enqueue_of_its_job(storage, redis_server):
    enqueue(storage)
    heard = []
    unsubscribe = storage.subscribe_new(QUEUE, heard.append, "a")
    assert redis_server.run("EXISTS", f"{{q:{QUEUE}}}:watch") == 0

    storage.enqueue([batch(ids=["b"])])
    assert redis_server.run("EXISTS", f"{{q:{QUEUE}}}:watch") == 0
    storage.enqueue([batch(ids=["a"])._replace(fresh=True)])

    eventually(lambda: [event.event for event in heard] == ["enqueued"])
    unsubscribe()


@pytest.mark.parametrize("given", [{"ids": ["a"], "delay": 60_000}, {"ids": ["a", "c"]}, {"ids": ["a"]}])
def test_subscription_begins_with_any_kind_of_enqueue(open_storage, given):
    storage = open_storage(policies={QUEUE: QueuePolicy(max_size=25)} if len(given["ids"]) > 1 else {})
    heard = []
    unsubscribe = storage.subscribe_new(QUEUE, heard.append, "a")

    storage.enqueue([batch(**given)])

    eventually(lambda: [event.id for event in heard] == ["a"])
    unsubscribe()


def contents(server):
    """Return what the keys of the queue hold, without the caller's sequence and the server's times."""
    with redis.Redis.from_url(server.url) as client:
        found = {key.decode().partition("}:")[2]: key for key in client.keys(f"{{q:{QUEUE}}}:*")}
        log = [fields for _, fields in client.xrange(found.pop("log"))]
        found.pop("version")
        return log, {
            name: (client.dump(key), client.ttl(key))
            for name, key in found.items()
            if not name.startswith("sequence:")
        }


@pytest.mark.parametrize("options", [{}, {"subject": "shop.order:1"}, {"max_attempts": 9, "tags": ("a",)}])
@pytest.mark.parametrize("count", [1, 3, 1_000])
def test_short_enqueue_script_stores_the_same_as_the_full_script(open_storage, redis_server, count, options):
    left = []
    given = batch(ids=[f"job-{number}" for number in range(count)], **options)
    for fresh in (True, False):
        redis_server.clean()
        storage = open_storage(clock=FakeClock())
        enqueue(storage, id="first")
        _, call = storage._enqueueing.direct(given._replace(fresh=fresh))
        assert call.script.name == ("add" if fresh else "enqueue")
        results = storage.enqueue([given._replace(fresh=fresh)])
        assert {result.status for result in results} == {"queued"}
        with redis.Redis.from_url(redis_server.url) as client:
            assert client.hlen(f"{{q:{QUEUE}}}:jobs") == count + 1
        left.append(contents(redis_server))

    assert left[0] == left[1]


@pytest.mark.parametrize("kind", ["redis_options", "cluster_options"])
async def test_parts_of_an_async_enqueue_do_not_overtake_each_other(request, monkeypatch, kind):
    storage = RedisStorage(**request.getfixturevalue(kind))
    exchange = storage._roundtrips._exchange
    in_flight, most = 0, 0

    def watched(ask):
        async def asking(words):
            nonlocal in_flight, most
            in_flight += 1
            most = max(most, in_flight)
            try:
                return await ask(words)
            finally:
                in_flight -= 1

        return asking

    for name in ("aask", "aask_many"):
        monkeypatch.setattr(exchange, name, watched(getattr(exchange, name)))
    try:
        results = await storage.aenqueue([batch(2_500), batch(2_500)])

        assert most == 1
        assert claim_ids(storage, 5_000) == [result.id for result in results]
    finally:
        storage.close()
