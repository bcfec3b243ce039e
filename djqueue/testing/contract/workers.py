"""Workers: each is known for as long as it is heard of."""

from djqueue.storage.base import Storage

from ..factories import worker
from .case import StorageCase


class WorkersContract(StorageCase):
    """Cases about the list of workers."""

    def test_a_worker_is_listed_as_it_describes_itself(self, storage: Storage) -> None:
        info = worker("höst-1:2", host="höst", pid=7, queues=("a", "b"), names=("x", "y"), active=3)

        storage.register_worker(info)

        [listed] = storage.workers()
        assert listed._replace(seen_at=0) == info
        assert abs(listed.seen_at - self.now(storage)) < 60_000

    def test_a_worker_heard_of_again_is_listed_once_as_it_is_now(self, storage: Storage) -> None:
        storage.register_worker(worker("w1"))
        first = storage.workers()[0].seen_at
        self.advance(50)
        storage.register_worker(worker("w1", active=2, state="stopping"))

        [listed] = storage.workers()
        assert (listed.active, listed.state) == (2, "stopping")
        assert listed.seen_at > first

    def test_a_worker_that_has_stopped_is_gone_at_once(self, storage: Storage) -> None:
        storage.register_worker(worker("w1"))
        storage.register_worker(worker("w2"))

        storage.unregister_worker("w1")
        storage.unregister_worker("nobody")

        assert [info.id for info in storage.workers()] == ["w2"]

    def test_each_worker_is_gone_after_its_own_silence(self, storage: Storage) -> None:
        """One that is silent, or stops, does not take the others along."""
        for name in ("silent", "alive", "stopping"):
            storage.register_worker(worker(name))

        for step in range(4):
            self.pass_time(storage, self.worker_ttl // 2)
            storage.register_worker(worker("alive"))
            if step == 0:
                storage.unregister_worker("stopping")

        assert [info.id for info in storage.workers()] == ["alive"]

    def test_a_worker_that_is_late_once_is_not_gone(self, storage: Storage) -> None:
        storage.register_worker(worker("w1"))

        self.pass_time(storage, self.worker_ttl // 2)

        assert [info.id for info in storage.workers()] == ["w1"]

    def test_a_worker_thought_gone_may_come_back(self, storage: Storage) -> None:
        storage.register_worker(worker("w1"))
        self.pass_time(storage, 2 * self.worker_ttl)
        assert storage.workers() == []

        storage.register_worker(worker("w1"))

        assert [info.id for info in storage.workers()] == ["w1"]

    def test_many_workers_are_listed(self, storage: Storage) -> None:
        names = {f"worker-{number}" for number in range(200)}
        for name in names:
            storage.register_worker(worker(name))

        assert {info.id for info in storage.workers()} == names
