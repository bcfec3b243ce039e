"""The event feed of the Redis storage: on a single node, and on a cluster of three masters."""

from contextlib import closing

import pytest

from djqueue.core.errors import OptionError
from djqueue.storage.export import EventsLostError, FeedRange
from djqueue.storage.redis import RedisStorage
from djqueue.testing.factories import batch, claim, completing, failing, finish, job

QUEUE = "default"


@pytest.fixture(params=["redis_options", pytest.param("cluster_options", marks=pytest.mark.thorough)])
def storage(request):
    with closing(RedisStorage(**request.getfixturevalue(request.param))) as storage:
        yield storage


@pytest.fixture
def small(redis_options):
    """One that keeps about a hundred calls, as Redis trims a stream by the hundred."""
    with closing(RedisStorage(**redis_options, stream=100)) as storage:
        yield storage


def read(storage, start, end, *, complete=True, size=1_000):
    rows = []
    for stream, place in end.items():
        stretch = FeedRange(stream, start.get(stream, "0-0 0 *"), place)
        for page in storage.capabilities.feed.read(stretch, size, complete=complete):
            rows += [dict(zip(page, values, strict=True)) for values in zip(*page.values(), strict=True)]
    return rows


def told(rows):
    return [(row["id"], row["event"]) for row in rows]


def test_event_stream_contains_every_change_of_a_job(storage):
    start = storage.capabilities.feed.last(None)
    [first, second] = [answer.id for answer in storage.enqueue([batch(2)])]
    [one, other] = claim(storage, 2)
    finish(storage, completing(one), failing(other))
    storage.jobs.promote(QUEUE, [storage.enqueue([batch(delay=60_000)])[0].id])
    storage.jobs.remove(QUEUE, [first])

    rows = read(storage, start, storage.capabilities.feed.last(None))

    third = rows[-2]["id"]
    assert told(rows) == [
        (first, "waiting"),
        (second, "waiting"),
        (first, "active"),
        (second, "active"),
        (first, "completed"),
        (second, "failed"),
        (third, "delayed"),
        (third, "waiting"),
        (first, "removed"),
    ]
    assert [row["name"] for row in rows if row["id"] == second] == ["handler"] * 3
    assert {row["name"] for row in rows if row["id"] == first} == {None}
    assert rows[0]["queue"] == QUEUE
    assert abs(rows[0]["at"] - job(storage, second).created_at) < 1_000
    assert len({row["offset"] for row in rows}) == len(rows)


def test_reading_a_range_again_returns_the_same_rows(storage):
    storage.enqueue([batch(5)])
    start = storage.capabilities.feed.first(None)
    end = storage.capabilities.feed.last(None)
    before = read(storage, start, end)
    finish(storage, *map(completing, claim(storage, 5)))

    assert read(storage, start, end) == before
    assert len(before) == 5
    assert read(storage, end, end) == []


@pytest.mark.parametrize("most", [1, 2, 3, 7, 100])
def test_small_pages_contain_all_rows_in_order(storage, most):
    for many in (5, 1, 4):
        storage.enqueue([batch(many), batch(many, queue="other")])
    place, end = storage.capabilities.feed.first(None), storage.capabilities.feed.last(None)
    whole = read(storage, place, end)
    parts = []
    while place != end:
        following = storage.capabilities.feed.ahead(place, end, most)
        part = read(storage, place, following)
        assert 1 <= len(part) <= most
        parts += part
        place = following

    for queue in (QUEUE, "other"):
        assert [row for row in parts if row["queue"] == queue] == [
            row for row in whole if row["queue"] == queue
        ]


def test_queues_share_a_row_limit_and_use_the_unused_rows_of_others(storage):
    storage.enqueue([batch(20), batch(3, queue="short"), batch(20, queue="third")])
    start, end = storage.capabilities.feed.first(None), storage.capabilities.feed.last(None)

    found = read(storage, start, storage.capabilities.feed.ahead(start, end, 21))

    assert [sum(row["queue"] == queue for row in found) for queue in ("short", QUEUE, "third")] == [3, 9, 9]


def test_new_queue_is_read_from_its_first_event(storage):
    start = storage.capabilities.feed.last(None)
    [answer] = storage.enqueue([batch(queue="new")])

    assert told(
        read(storage, start, storage.capabilities.feed.ahead(start, storage.capabilities.feed.last(None), 10))
    ) == [(answer.id, "waiting")]


def test_trimmed_unread_events_are_an_error_or_skipped(small):
    small.enqueue([batch()])
    start = small.capabilities.feed.first(None)
    for _ in range(400):
        small.enqueue([batch()])
    end = small.capabilities.feed.last(None)

    with pytest.raises(EventsLostError, match="queue 'default': events were trimmed before they were read"):
        read(small, start, end)
    left = read(small, start, end, complete=False)
    assert 100 <= len(left) < 401
    assert read(small, small.capabilities.feed.first(None), end) == left


def test_trimmed_events_that_were_read_are_no_error(small):
    small.enqueue([batch()])
    start = small.capabilities.feed.last(None)
    small.enqueue([batch()])
    end = small.capabilities.feed.last(None)

    assert len(read(small, start, end)) == 1
    for _ in range(400):
        small.enqueue([batch()])
    assert read(small, end, end) == []


def test_obliterated_queue_has_lost_its_events(storage):
    lost = {answer.id for answer in storage.enqueue([batch(3)])}
    start, end = storage.capabilities.feed.first(None), storage.capabilities.feed.last(None)
    storage.queues.obliterate(QUEUE)
    storage.enqueue([batch()])

    with pytest.raises(EventsLostError):
        read(storage, start, {QUEUE: "9999999999999-0 3 *"})
    # What comes in the same millisecond may have the last one's place.
    assert lost.isdisjoint(row["id"] for row in read(storage, start, end, complete=False))


def test_event_feed_requires_the_stream_option(redis_options):
    with closing(RedisStorage(**redis_options, mirror=False)) as silent:
        silent.enqueue([batch()])
        assert silent.capabilities.feed is None
    with (
        closing(RedisStorage(**redis_options)) as storage,
        pytest.raises(OptionError, match="no queue keeps a change stream"),
    ):
        storage.capabilities.feed.last(None)


@pytest.mark.parametrize(
    "ids",
    [
        None,
        [f"order-{n:05}-x" for n in range(300)],
        [f"{n}%" for n in range(300)],
        [str(n) for n in range(300)],
    ],
    ids=["own", "one length", "special characters", "several lengths"],
)
def test_events_of_a_large_batch_contain_the_ids_of_its_jobs(storage, ids):
    storage.enqueue([batch()])
    changes = storage.capabilities.changes
    changes.go_on(QUEUE, changes.follow(QUEUE))
    start = storage.capabilities.feed.last(None)

    results = storage.enqueue([batch(300) if ids is None else batch(ids=ids)])

    rows = read(storage, start, storage.capabilities.feed.last(None))
    assert told(rows) == [(result.id, "waiting") for result in results]
    assert {row["name"] for row in rows} == {batch().name}
    assert changes.next(QUEUE).ids == [result.id for result in results]


@pytest.mark.parametrize("count", [3, 300])
def test_ids_of_equal_byte_length_are_read_correctly(storage, count):
    ids = [f"\N{LATIN SMALL LETTER E WITH ACUTE}{number:03}\N{EURO SIGN}" for number in range(count)]
    start = storage.capabilities.feed.last(None)
    storage.enqueue([batch(ids=ids, count=count)])

    assert [row["id"] for row in read(storage, start, storage.capabilities.feed.last(None))] == ids
