"""Streams of events and their tasks, on a real Redis without Spark."""

from copy import deepcopy

import pytest

from djqueue.contrib.spark.options import ReadOptions
from djqueue.contrib.spark.reading import JobEventStream
from djqueue.contrib.spark.tables import EVENTS
from djqueue.testing.factories import batch


@pytest.fixture
def url(redis_url):
    return redis_url


@pytest.fixture
def follow(url):
    def follow(**given):
        return JobEventStream(ReadOptions.read({"url": url, "table": "events", **given}))

    return follow


def rows(stream, start, end):
    found = [one for part in stream.ranges(start, end) for one in deepcopy(stream).run_task(part)]
    return [row for one in found for row in one.to_pylist()]


def test_stream_starts_at_the_latest_event_by_default(follow, storage):
    storage.enqueue([batch(3)])
    late, early = follow(), follow(startingOffsets="earliest")
    begin = late.start()
    [answer] = storage.enqueue([batch()])

    assert [row["id"] for row in rows(late, begin, late.next_end(begin, None))] == [answer.id]
    assert len(rows(early, early.start(), early.latest())) == 4


def test_event_row_has_the_columns_of_the_table(follow, storage):
    stream = follow()
    begin = stream.start()
    [answer] = storage.enqueue([batch()])

    [row] = rows(stream, begin, stream.latest())

    assert list(row) == EVENTS.names()
    assert (row["id"], row["event"], row["name"]) == (answer.id, "waiting", "handler")


def test_stream_with_a_stop_point_reads_no_later_events(follow, storage):
    stream = follow(startingOffsets="earliest")
    place = stream.start()
    storage.enqueue([batch(5)])
    stream.stop_at_current_end()
    storage.enqueue([batch(5)])
    storage.enqueue([batch(5, queue="new")])
    sizes = []
    while (end := stream.next_end(place, 2)) != place:
        sizes.append(len(rows(stream, place, end)))
        place = end

    assert sizes == [2, 2, 1]


def test_stream_of_one_queue_reads_only_its_events(follow, storage):
    stream = follow(queue="mail")
    place = stream.start()
    storage.enqueue([batch(2), batch(1, queue="mail")])

    assert [row["queue"] for row in rows(stream, place, stream.next_end(place, 10))] == ["mail"]


def test_stream_without_new_events_has_no_ranges(follow, storage):
    storage.enqueue([batch()])
    stream = follow()
    begin = stream.start()

    assert stream.ranges(begin, stream.next_end(begin, None)) == []
    assert stream.ranges(begin, stream.next_end(begin, 5)) == []
