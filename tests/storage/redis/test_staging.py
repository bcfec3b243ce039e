"""Jobs that are put aside in Redis, and published together."""

from contextlib import closing

from djqueue.storage.redis import RedisStorage
from djqueue.storage.redis.staging import PLAIN
from djqueue.testing import contract
from djqueue.testing.contract.staging import WRITE, fresh, place, staged
from djqueue.testing.factories import QUEUE, batch

from .cases import OnCluster, OnSingle


class TestSingle(OnSingle, contract.StagingContract):
    pass


class TestCluster(OnCluster, contract.StagingContract):
    pass


def test_all_of_a_part_expires_with_its_first_chunk(redis_options, redis_server):
    with closing(RedisStorage(**redis_options)) as storage:
        staged(storage, {"a": [fresh(1)]}, lifetime=50_000)
        staged(storage, {"a": [fresh(1), fresh(1)]}, lifetime=90_000)
        keys = storage.keys(QUEUE)
        with redis_server.client() as redis:
            lifetimes = [redis.pttl(key) for key in (keys.staged(WRITE, "a"), keys.parts(WRITE))]

    assert all(0 < lifetime <= 50_000 for lifetime in lifetimes)


def test_a_manifest_keeps_what_it_names_for_a_week(redis_options, redis_server):
    with closing(RedisStorage(**redis_options)) as storage:
        manifest = staged(storage, {"a": [fresh(1)]}, lifetime=50_000)
        place(storage).begin(manifest, 1_000)
        with redis_server.client() as redis:
            keys = storage.keys(QUEUE)
            assert redis.pttl(keys.staged(WRITE, "a")) > 600_000_000
            assert redis.pttl(keys.published(manifest.app)) == -1, "what was begun is known until it is done"


def test_tags_leave_a_chunk_plain(redis_options):
    with closing(RedisStorage(**redis_options)) as storage:
        tagged = batch(2, ids=["a", "b"], tags=("import:1",))._replace(fresh=True)
        grouped = batch(1, ids=["c"], group="g")._replace(fresh=True)

        assert place(storage).stage(WRITE, "a", 0, [tagged]) == PLAIN
        assert place(storage).stage(WRITE, "b", 0, [grouped]) != PLAIN
