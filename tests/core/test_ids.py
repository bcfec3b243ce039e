"""UUIDv7 ids ascend across threads and clock changes."""

import os
import subprocess
import sys
from threading import Barrier, Thread
from uuid import RFC_4122, UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djqueue.core.ids import IdSource
from tests.support import PATIENCE

NOW = 1_700_000_000_000


@given(st.integers(0, 2**48 - 10), st.integers(1, 5))
def test_ids_are_uuid7_with_their_time(now, count):
    for job_id in IdSource().many(count, now):
        uuid = UUID(job_id)
        assert (uuid.version, uuid.variant) == (7, RFC_4122)
        assert uuid.int >> 80 == now
        assert str(uuid) == job_id


@given(st.lists(st.tuples(st.integers(NOW - 10, NOW + 10), st.integers(0, 6_000)), max_size=12))
@settings(max_examples=30, deadline=None)
def test_ids_ascend_although_the_clock_goes_back(calls):
    source = IdSource()
    ids = [job_id for now, count in calls for job_id in source.many(count, now)]

    assert ids == sorted(set(ids))


def test_ids_beyond_the_capacity_of_a_millisecond_use_the_next():
    ids = IdSource().many(10_000, NOW)

    assert ids == sorted(set(ids))
    assert UUID(ids[-1]).int >> 80 == NOW + 10_000 // 4_096


def test_threads_share_an_id_source():
    source, start = IdSource(), Barrier(4, timeout=PATIENCE)
    found = [[] for _ in range(4)]

    def work(mine):
        start.wait()
        for _ in range(500):
            mine.append(source.new(NOW))
            mine += source.many(3, NOW)

    threads = [Thread(target=work, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(mine == sorted(mine) for mine in found)
    assert len({job_id for mine in found for job_id in mine}) == 4 * 500 * 4


def test_randomness_of_ids_can_be_injected():
    ids = IdSource(random_bytes=lambda count: b"\xab" * count).many(2, NOW)

    assert ids[0][14:] == "7000-8aba-babababababa"
    assert ids[1][14:18] == "7001"


FORK = """
import os, sys
from djqueue.core.ids import IdSource

source = IdSource()
with source._lock:
    child = os.fork()
    if child == 0:
        print(source.new(int(sys.argv[1])), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
print(source.new(int(sys.argv[1])))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_makes_ids_although_the_parent_held_the_lock():
    command = [sys.executable, "-c", FORK, str(NOW)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout

    of_child, of_parent = said.split()
    assert UUID(of_child).version == UUID(of_parent).version == 7
    assert of_child != of_parent
