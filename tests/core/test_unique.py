"""A unique key belongs to one job until its owner ends or the key expires."""

from djqueue.core.engine.indexes import UniqueKeys
from tests.core.making import make_job


def test_first_job_owns_the_key_until_released():
    keys = UniqueKeys()
    first = make_job(unique_key="k")
    keys.take(first)

    assert keys.owner("k", 10**15) is first
    keys.release(first, 0)
    assert keys.owner("k", 0) is None
    assert len(keys) == 0


def test_job_without_a_key_takes_and_releases_nothing():
    keys = UniqueKeys()
    job = make_job()
    keys.take(job)
    keys.release(job, 0)

    assert len(keys) == 0


def test_expired_key_is_free_although_its_owner_is_live():
    keys = UniqueKeys()
    job = make_job(unique_key="k", unique_ttl=100, created_at=1_000)
    keys.take(job)

    assert keys.owner("k", 1_099) is job
    assert keys.owner("k", 1_100) is None
    assert len(keys) == 0


def test_earlier_owner_does_not_release_the_key_of_a_later_one():
    keys = UniqueKeys()
    first, second = make_job(unique_key="k", unique_ttl=1), make_job(unique_key="k")
    keys.take(first)
    assert keys.owner("k", 2_000) is None
    keys.take(second)

    keys.release(first, 0)

    assert keys.owner("k", 2_000) is second


def test_sweep_removes_expired_keys():
    keys = UniqueKeys()
    brief = make_job(unique_key="brief", unique_ttl=5, created_at=0)
    lasting = make_job(unique_key="lasting")
    keys.take(brief)
    keys.take(lasting)

    keys.sweep(5)

    assert len(keys) == 1
    assert keys.owner("lasting", 5) is lasting


def test_successor_gets_the_key_when_its_owner_is_removed():
    keys = UniqueKeys()
    first, second = make_job(unique_key="k"), make_job(unique_key="k")
    keys.take(first)
    keys.wait(second, first)

    assert keys.is_followed(first)
    assert keys.waiting("k") is second
    assert keys.release(first, 0) is second
    assert keys.owner("k", 0) is second
    assert keys.waiting("k") is None


def test_removed_successor_releases_nothing():
    keys = UniqueKeys()
    first, second = make_job(unique_key="k"), make_job(unique_key="k")
    keys.take(first)
    keys.wait(second, first)

    assert keys.release(second, 0) is None
    assert not keys.is_followed(first)
    assert keys.owner("k", 0) is first
    assert keys.release(first, 0) is None
    assert len(keys) == 0


def test_successor_does_not_take_a_key_held_by_another_job():
    keys = UniqueKeys()
    first, second = make_job(unique_key="k", unique_ttl=5, created_at=0), make_job(unique_key="k")
    keys.take(first)
    keys.wait(second, first)
    assert keys.owner("k", 5) is None
    third = make_job(unique_key="k")
    keys.take(third)

    assert keys.release(first, 6) is second
    assert keys.owner("k", 6) is third


def test_expiry_entries_of_released_keys_are_removed():
    keys = UniqueKeys()
    for number in range(1_000):
        job = make_job(unique_key=f"k{number}", unique_ttl=10**9, created_at=number)
        keys.take(job)
        keys.release(job, number)

    kept = make_job(unique_key="kept", unique_ttl=5, created_at=0)
    keys.take(kept)
    assert len(keys._times) < 100
    keys.sweep(5)
    assert len(keys) == 0
