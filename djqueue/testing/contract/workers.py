"""Workers: each is listed while it sends heartbeats, and receives each command once."""

from threading import Event

import pytest

from djqueue.core.errors import OptionError
from djqueue.core.workers import DUMP_TTL, MAX_DUMP, ProcessInfo, RunningJob
from djqueue.storage.base import Storage

from ..factories import worker
from ..waiting import PATIENCE
from .case import StorageCase


class WorkersContract(StorageCase):
    """Cases about the list of workers, and about steering them."""

    def test_worker_is_listed_as_it_describes_itself(self, storage: Storage) -> None:
        info = worker("höst-1:2", host="höst", pid=7, queues=("a", "b"), names=("x", "y"), active=3)

        storage.workers.register(info)

        [listed] = storage.workers.all()
        assert listed._replace(seen_at=0) == info
        assert abs(listed.seen_at - self.now(storage)) < 60_000

    def test_worker_is_listed_with_its_jobs_and_processes(self, storage: Storage) -> None:
        info = worker(
            kind="runworkers",
            heartbeat=5_000,
            rss=3_000_000_000,
            version="1.2",
            project="2026.11-ü",
            jobs=(RunningJob("emails", "id-1", "send ü", 1_700_000_000_123), RunningJob("a", "b", "c", 1)),
            supervisor=4_711,
            processes=(
                ProcessInfo(12, "send ü", "isolated", 3, 40_000_000, "emails", "id-1"),
                ProcessInfo(13, "c", "subprocess", 1, 0),
            ),
        )

        storage.workers.register(info)

        [listed] = storage.workers.all()
        assert listed._replace(seen_at=0) == info

    def test_worker_is_listed_once_with_its_latest_heartbeat(self, storage: Storage) -> None:
        storage.workers.register(worker("w1"))
        first = storage.workers.all()[0].seen_at
        self.advance(50)
        storage.workers.register(worker("w1", active=2, state="stopping"))

        [listed] = storage.workers.all()
        assert (listed.active, listed.state) == (2, "stopping")
        assert listed.seen_at > first

    def test_unregistered_worker_is_not_listed(self, storage: Storage) -> None:
        storage.workers.register(worker("w1"))
        storage.workers.register(worker("w2"))

        storage.workers.unregister("w1")
        storage.workers.unregister("nobody")

        assert [info.id for info in storage.workers.all()] == ["w2"]

    def test_each_worker_expires_after_its_own_silence(self, storage: Storage) -> None:
        """One that is silent, or stops, does not take the others along."""
        for name in ("silent", "alive", "stopping"):
            storage.workers.register(worker(name))

        for step in range(4):
            self.pass_time(storage, self.worker_ttl // 2)
            storage.workers.register(worker("alive"))
            if step == 0:
                storage.workers.unregister("stopping")

        assert [info.id for info in storage.workers.all()] == ["alive"]

    def test_worker_with_a_late_heartbeat_is_still_listed(self, storage: Storage) -> None:
        storage.workers.register(worker("w1"))

        self.pass_time(storage, self.worker_ttl // 2)

        assert [info.id for info in storage.workers.all()] == ["w1"]

    def test_expired_worker_can_register_again(self, storage: Storage) -> None:
        storage.workers.register(worker("w1"))
        self.pass_time(storage, 2 * self.worker_ttl)
        assert storage.workers.all() == []

        storage.workers.register(worker("w1"))

        assert [info.id for info in storage.workers.all()] == ["w1"]

    def test_hundreds_of_workers_are_listed(self, storage: Storage) -> None:
        names = {f"worker-{number}" for number in range(200)}
        for name in names:
            storage.workers.register(worker(name))

        assert {info.id for info in storage.workers.all()} == names

    # Steering.

    def test_worker_receives_a_command_once(self, storage: Storage) -> None:
        info = worker("höst-1:2")
        assert storage.workers.register(info) == ()

        assert storage.workers.control("höst-1:2", "quiet") == "asked"

        assert storage.workers.register(info) == ("quiet",)
        assert storage.workers.register(info) == ()

    def test_command_is_received_only_by_its_worker(self, storage: Storage) -> None:
        storage.workers.register(worker("w1"))
        storage.workers.register(worker("w2"))

        storage.workers.control("w2", "stop")

        assert storage.workers.register(worker("w1")) == ()
        assert storage.workers.register(worker("w2")) == ("stop",)

    def test_command_to_unregistered_worker_is_rejected(self, storage: Storage) -> None:
        storage.workers.register(worker("w1"))
        storage.workers.unregister("w1")

        assert storage.workers.control("w1", "quiet") == "not_found"
        assert storage.workers.control("nobody", "dump") == "not_found"

        assert storage.workers.register(worker("w1")) == ()

    def test_command_to_expired_worker_is_rejected(self, storage: Storage) -> None:
        storage.workers.register(worker("w1"))
        self.pass_time(storage, 2 * self.worker_ttl)

        assert storage.workers.control("w1", "quiet") == "not_found"

    def test_latest_commands_replace_earlier_ones_before_the_heartbeat(self, storage: Storage) -> None:
        storage.workers.register(worker("w1"))

        for command in ("quiet", "dump", "resume", "dump", "quiet", "quiet"):
            assert storage.workers.control("w1", command) == "asked"

        assert storage.workers.register(worker("w1")) == ("dump", "quiet")

    def test_stopping_worker_accepts_only_the_dump_command(self, storage: Storage) -> None:
        storage.workers.register(worker("w1"))
        assert storage.workers.control("w1", "quiet") == "asked"
        assert storage.workers.control("w1", "stop") == "asked"

        for command in ("quiet", "resume", "stop"):
            assert storage.workers.control("w1", command) == "stopping"
        assert storage.workers.control("w1", "dump") == "asked"

        stopping = worker("w1", state="stopping")
        assert storage.workers.register(stopping) == ("stop", "dump")
        for command in ("quiet", "resume", "stop"):
            assert storage.workers.control("w1", command) == "stopping"
        assert storage.workers.control("w1", "dump") == "asked"
        assert storage.workers.register(stopping) == ("dump",)

    def test_pending_commands_end_with_their_worker(self, storage: Storage) -> None:
        """Also for the next one of that name: by its goodbye, by silence, and by another start."""
        storage.workers.register(worker("w1", started_at=1_700_000_000_000))
        storage.workers.control("w1", "stop")
        storage.workers.unregister("w1")
        assert storage.workers.register(worker("w1", started_at=1_700_000_000_000)) == ()

        storage.workers.control("w1", "stop")
        self.pass_time(storage, 2 * self.worker_ttl)
        assert storage.workers.register(worker("w1", started_at=1_700_000_000_000)) == ()

        storage.workers.control("w1", "stop")
        again = worker("w1", started_at=1_700_000_000_001)
        assert storage.workers.register(again) == ()
        assert storage.workers.register(again) == ()
        assert storage.workers.control("w1", "quiet") == "asked"
        assert storage.workers.register(again) == ("quiet",)

    def test_unknown_command_is_rejected(self, storage: Storage) -> None:
        storage.workers.register(worker("w1"))

        with pytest.raises(OptionError):
            storage.workers.control("w1", "explode")

        assert storage.workers.register(worker("w1")) == ()

    def test_command_listener_is_woken_by_commands_to_its_worker(self, storage: Storage) -> None:
        storage.workers.register(worker("w1"))
        storage.workers.register(worker("w2"))
        woken, other = Event(), Event()
        unfollow = storage.workers.on_command("w1", woken.set)
        unfollow_other = storage.workers.on_command("w2", other.set)
        woken.clear()
        other.clear()

        storage.workers.control("w1", "dump")
        assert woken.wait(PATIENCE)

        unfollow()
        unfollow()
        woken.clear()
        storage.workers.control("w1", "quiet")
        storage.workers.control("w2", "quiet")
        assert other.wait(PATIENCE)
        assert not woken.is_set()
        unfollow_other()

    def test_dump_expires(self, storage: Storage) -> None:
        storage.workers.register(worker("w1"))
        assert storage.workers.dump("w1") is None

        assert storage.workers.save_dump("w1", "first")
        assert storage.workers.save_dump("w1", 'File "jöbs.py", line 1')

        dump = storage.workers.dump("w1")
        assert dump is not None
        assert dump.text == 'File "jöbs.py", line 1'
        assert abs(dump.at - self.now(storage)) < 60_000
        for _ in range(DUMP_TTL // 30_000 + 1):
            self.pass_time(storage, 30_000)
            storage.workers.register(worker("w1"))
        assert storage.workers.dump("w1") is None

    def test_dump_is_truncated_to_its_maximum_size(self, storage: Storage) -> None:
        storage.workers.register(worker("w1"))

        storage.workers.save_dump("w1", "ü" * (MAX_DUMP + 1))

        dump = storage.workers.dump("w1")
        assert dump is not None
        assert dump.text == "ü" * MAX_DUMP

    def test_dump_is_removed_with_its_worker(self, storage: Storage) -> None:
        assert not storage.workers.save_dump("w1", "nobody's")
        assert storage.workers.dump("w1") is None
        storage.workers.register(worker("w1"))
        storage.workers.save_dump("w1", "mine")

        storage.workers.unregister("w1")
        storage.workers.register(worker("w1"))

        assert storage.workers.dump("w1") is None
