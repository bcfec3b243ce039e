"""Staged jobs in Redis, which are published together."""

from contextlib import closing

import pytest

from djqueue.storage.redis import RedisStorage
from djqueue.storage.redis.bulkwrites import PLAIN
from djqueue.storage.staging import RESUMABLE, Counts, Manifest, chunks_of
from djqueue.testing.contract.staging import WRITE, fresh, place, plan, publish, publish_rest, staged
from djqueue.testing.factories import QUEUE, batch
from tests.storage.clockplans import StagingOnAClock

from .cases import OnCluster, OnSingle


class TestSingle(OnSingle, StagingOnAClock):
    pass


@pytest.mark.thorough
class TestCluster(OnCluster, StagingOnAClock):
    pass


def test_staged_part_expires_with_its_first_chunk(redis_options, redis_server):
    with closing(RedisStorage(**redis_options)) as storage:
        staged(storage, {"a": [fresh(1)]}, lifetime=50_000)
        staged(storage, {"a": [fresh(1), fresh(1)]}, lifetime=90_000)
        keys = storage.keys(QUEUE)
        with redis_server.client() as redis:
            lifetimes = [redis.pttl(key) for key in (keys.staged(WRITE, "a"), keys.parts(WRITE))]

    assert all(0 < lifetime <= 50_000 for lifetime in lifetimes)


def test_manifest_keeps_its_staged_parts_for_a_week(redis_options, redis_server):
    with closing(RedisStorage(**redis_options)) as storage:
        manifest = staged(storage, {"a": [fresh(1)]}, lifetime=50_000)
        place(storage).begin(manifest, None)
        with redis_server.client() as redis:
            keys = storage.keys(QUEUE)
            assert redis.pttl(keys.staged(WRITE, "a")) > 600_000_000
            assert redis.pttl(keys.published(manifest.app)) == -1, "what was begun is known until it is done"


def test_publication_of_an_unnamed_write_expires_as_a_whole(redis_options, redis_server):
    with closing(RedisStorage(**redis_options)) as storage:
        manifest = staged(storage, {"a": [fresh(1), fresh(1), fresh(1)]}, lifetime=50_000)
        mine = plan({QUEUE: manifest.parts}, lifetime=1_000)
        place(storage).commit(mine)
        place(storage).begin(manifest, 1_000)
        place(storage).publish(manifest, [("a", 0), ("a", 1)])
        keys = storage.keys(QUEUE)
        kept = [
            keys.staged(WRITE, "a"),
            keys.published(manifest.app),
            keys.published(manifest.app, chunks=True),
            storage._keyspace.common.plan(mine.app, mine.target),
        ]
        with redis_server.client() as redis:
            assert all(600_000_000 < redis.pttl(key) <= RESUMABLE for key in kept)
            for key in kept:
                redis.pexpire(key, 50_000)
            assert place(storage).begin(manifest, 1_000).status == "resumed"
            place(storage).touch(mine)
            assert all(600_000_000 < redis.pttl(key) <= RESUMABLE for key in kept)

        assert publish_rest(storage, manifest) == Counts(queued=3)


def test_results_of_an_evicted_publication_do_not_count_for_the_next(redis_options, redis_server):
    with closing(RedisStorage(**redis_options)) as storage:
        first = staged(storage, {"0.0": [fresh(2), fresh(2)]})
        place(storage).begin(first, None)
        place(storage).publish(first, chunks_of(first))
        with redis_server.client() as redis:
            redis.delete(storage.keys(QUEUE).published(first.app))

        # Another session numbers its tasks from 0, too.
        second = staged(storage, {"0.0": [fresh(3), fresh(3)]}, write="next", version=2)
        assert publish(storage, second) == Counts(queued=6)


def test_publisher_starting_while_its_plan_is_dropped_leaves_no_keys(
    redis_options, redis_server, monkeypatch
):
    with closing(RedisStorage(**redis_options)) as storage:
        manifests = [staged(storage, {"a": [fresh(2, queue=name)]}, queue=name) for name in ("a", "b")]
        mine = plan({one.queue: one.parts for one in manifests})
        place(storage).commit(mine)
        forget = place(storage)._forget
        turns = []

        def begins(*given):
            if not turns:
                place(storage).begin_all(manifests, None)
            turns.append(None)
            return (yield from forget(*given))

        monkeypatch.setattr(place(storage), "_forget", begins)
        assert place(storage).drop(mine)

        assert place(storage).state_of(mine) == ""
        with redis_server.client() as redis:
            assert [*redis.keys("*stage:*"), *redis.keys("*published:*")] == []


def test_chunk_with_tags_stays_plain(redis_options):
    with closing(RedisStorage(**redis_options)) as storage:
        tagged = batch(2, ids=["a", "b"], tags=("import:1",))._replace(fresh=True)
        grouped = batch(1, ids=["c"], concurrency_key="g")._replace(fresh=True)

        assert place(storage).stage(WRITE, "a", 0, [tagged]) == PLAIN
        assert place(storage).stage(WRITE, "b", 0, [grouped]) != PLAIN


def test_each_publishing_script_handles_a_bounded_number_of_jobs(redis_options, redis_server):
    cases = {
        "large": (fresh(1)._replace(payloads=[b"x" * 100_000] * 30, ids=[*map(str, range(30))]), 12),
        "with options": (batch(1_000, ids=[f"o{at}" for at in range(1_000)], priority=5), 120),
        "small": (batch(1_000, ids=[f"p{at}" for at in range(1_000)])._replace(fresh=True), 1_000),
    }
    with closing(RedisStorage(**redis_options)) as storage:
        for write, (jobs, most) in cases.items():
            kinds = place(storage).stage(write, "a", 0, [jobs])
            manifest = Manifest(QUEUE, write, 1, write, {"a": kinds})

            assert place(storage).begin(manifest, None).status == "new"
            published = place(storage).publish(manifest, chunks_of(manifest))

            assert max(one.queued for one in published) <= most
            assert place(storage).end(manifest) == Counts(queued=len(jobs.payloads))


def test_chunks_published_by_an_earlier_version_are_counted(redis_options, redis_server):
    with closing(RedisStorage(**redis_options)) as storage:
        manifest = staged(storage, {"a": [fresh(3), fresh(2)]})
        place(storage).begin(manifest, None)
        place(storage).publish(manifest, chunks_of(manifest))
        results = storage.keys(QUEUE).published(manifest.app, chunks=True)
        with redis_server.client() as redis:
            redis.hdel(results, "=0", "=1")

        assert place(storage).end(manifest) == Counts(queued=5)


def test_split_chunk_that_is_staged_twice_is_published_once(redis_options):
    jobs = batch(500, ids=[*map(str, range(500))], priority=5)
    with closing(RedisStorage(**redis_options)) as storage:
        first = place(storage).stage(WRITE, "a", 0, [jobs])
        again = place(storage).stage(WRITE, "a", 0, [jobs])
        kinds = again + place(storage).stage(WRITE, "a", len(again), [batch(1, ids=["last"])])
        manifest = Manifest(QUEUE, "app", 1, WRITE, {"a": kinds})
        place(storage).begin(manifest, None)
        place(storage).publish(manifest, chunks_of(manifest))

        assert first == again
        assert len(first) > 1
        assert place(storage).end(manifest) == Counts(queued=501)
