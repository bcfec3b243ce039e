"""Plans of bulk writes, which are committed, withdrawn and adopted with the manifests of all their queues."""

from typing import Any

import pytest

from djqueue.core.errors import QueueFullError
from djqueue.core.states import State
from djqueue.storage.base import Storage
from djqueue.storage.staging import RESUMABLE, ChunkMissingError, Counts, Manifest, Plan, PlanState

from ..factories import QUEUE, claim, counts
from ..waiting import together
from .case import LATER, MAX_SIZE, PAIRS, SMALL, StorageCase
from .staging import APP, WRITE, fresh, place, plan, publish, publish_rest, staged


class PlansContract(StorageCase):
    """For storages in which writes of many queues can be staged."""

    def test_plan_is_committed_once(self, storage: Storage) -> None:
        first = plan({QUEUE: {"a": "p"}, PAIRS: {"b": "pp"}}, limit=5, is_batch=True)
        second = plan({QUEUE: {"c": "p"}}, write="again")

        assert place(storage).commit(first) == PlanState("new", first)
        assert place(storage).commit(first) == PlanState("new", first), "the reply was lost"
        assert place(storage).commit(second) == PlanState("resumed", first)
        assert place(storage).commit(second._replace(version=2)) == PlanState("unfinished", first)
        assert place(storage).state_of(first) == "open"
        assert place(storage).state_of(second) == ""

    def test_published_plan_is_returned_with_its_counts(self, storage: Storage) -> None:
        first, counts = plan({QUEUE: {"a": "p"}}), {QUEUE: Counts(3, 2, 1)}
        place(storage).commit(first)

        place(storage).close(first, counts)
        place(storage).close(first, {})

        found = place(storage).commit(first._replace(write="again"))
        assert found == PlanState("done", first._replace(queues={}), counts)
        assert place(storage).state_of(first) == "done"
        assert place(storage).commit(first._replace(write="next", version=2)).status == "new"

    def test_large_plan_versions_are_compared_exactly(self, storage: Storage) -> None:
        # A double is not exact above 2^53.
        small = plan({QUEUE: {"a": "p"}}, version=9)
        large = [plan({QUEUE: {"a": "p"}}, write=f"w{n}", version=2**53 + n) for n in range(2)]
        for one in (small, *large, small._replace(write="last", version=2**63 - 1)):
            assert place(storage).commit(one).status == "new"
            place(storage).close(one, {})

        assert place(storage).commit(large[1]._replace(write="again")).status == "done"

    def test_plans_of_other_targets_or_applications_are_independent(self, storage: Storage) -> None:
        first = plan({QUEUE: {"a": "p"}}, target=QUEUE)
        place(storage).commit(first)

        others: list[dict[str, Any]] = [
            {"target": ""},
            {"target": PAIRS},
            {"app": "weekly", "target": QUEUE},
        ]
        for other in others:
            assert place(storage).commit(first._replace(write="other", **other)).status == "new"

    def test_silent_plan_is_adopted_by_one_sweep(self, storage: Storage) -> None:
        first = plan({QUEUE: {"a": "p"}}, limit=7, lifetime=LATER)
        place(storage).commit(first)

        assert place(storage).adopt(1_000, 10) == []
        self.advance(2_000)
        place(storage).touch(first)
        assert place(storage).adopt(1_000, 10) == []
        self.advance(2_000)
        assert place(storage).adopt(1_000, 10) == [first]
        assert place(storage).adopt(1_000, 10) == []
        place(storage).leave(first)
        self.advance(2_000)
        assert place(storage).adopt(1_000, 10) == []
        assert place(storage).state_of(first) == "open"

    def test_published_plan_is_not_adopted(self, storage: Storage) -> None:
        first = plan({QUEUE: {"a": "p"}})
        place(storage).commit(first)
        place(storage).close(first, {QUEUE: Counts(1)})

        self.advance(2_000)

        assert place(storage).adopt(1_000, 10) == []

    def test_unpublished_plan_can_be_dropped(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(2)], "b": [fresh(1)]})
        mine = plan({QUEUE: manifest.parts})
        place(storage).commit(mine)
        place(storage).begin(manifest, None)

        assert place(storage).drop(mine)

        assert place(storage).state_of(mine) == ""
        with pytest.raises(ChunkMissingError):
            place(storage).begin(manifest, None)
        again = staged(storage, {"a": [fresh(2)]}, write="again")
        assert place(storage).commit(plan({QUEUE: again.parts}, write="again")).status == "new"
        assert publish(storage, again) == Counts(queued=2)

    def test_partly_published_plan_is_not_dropped(self, storage: Storage) -> None:
        manifest = staged(storage, {"a": [fresh(2)], "b": [fresh(1)]})
        mine = plan({QUEUE: manifest.parts})
        place(storage).commit(mine)
        place(storage).begin(manifest, None)
        place(storage).publish(manifest, [("a", 0)])

        assert not place(storage).drop(mine)

        assert place(storage).state_of(mine) == "open"
        assert publish_rest(storage, manifest) == Counts(queued=3)

    def test_plan_with_a_published_queue_is_not_dropped(self, storage: Storage) -> None:
        mine, manifests = begun(storage)
        publish_rest(storage, manifests[0])

        assert not place(storage).drop(mine)
        assert not place(storage).withdraw(mine)

        assert place(storage).state_of(mine) == "open"
        assert place(storage).begin_all(mine.manifests(), None)[0].status == "done"
        assert publish_rest(storage, manifests[1]) == Counts(queued=4)

    def test_unadopted_plan_is_withdrawn_as_a_whole(self, storage: Storage) -> None:
        mine, manifests = begun(storage)

        assert place(storage).withdraw(mine)

        assert place(storage).state_of(mine) == ""
        self.advance(2_000)
        assert place(storage).adopt(1_000, 10) == []
        for manifest in manifests:
            with pytest.raises(ChunkMissingError):
                place(storage).publish(manifest, [("a", 0)])
        assert counts(storage) == counts(storage, PAIRS) == {}

    def test_adopted_plan_is_not_withdrawn(self, storage: Storage) -> None:
        mine, manifests = begun(storage)
        self.advance(2_000)
        assert place(storage).adopt(1_000, 10) == [mine]

        assert not place(storage).withdraw(mine)

        assert place(storage).state_of(mine) == "open"
        assert [publish_rest(storage, one) for one in manifests] == [Counts(queued=4)] * 2

    def test_partly_published_plan_is_not_withdrawn(self, storage: Storage) -> None:
        mine, manifests = begun(storage)
        place(storage).publish(manifests[1], [("a", 1)])

        assert not place(storage).withdraw(mine)

        assert place(storage).state_of(mine) == "open"
        assert place(storage).begin_all(mine.manifests(), None)[1].status == "resumed"
        assert [publish_rest(storage, one) for one in manifests] == [Counts(queued=4)] * 2

    @pytest.mark.parametrize("turn", range(8))
    def test_plan_is_never_both_withdrawn_and_adopted(self, storage: Storage, turn: int) -> None:
        mine, manifests = begun(storage)
        self.advance(2_000)

        def sweep() -> list[Counts]:
            if not place(storage).adopt(1_000, 10):
                return []
            place(storage).begin_all(mine.manifests(), None)
            return [publish_rest(storage, one) for one in manifests]

        is_withdrawn, published = together([lambda: place(storage).withdraw(mine), sweep])

        assert published == ([] if is_withdrawn else [Counts(queued=4)] * 2)
        left = [sum(counts(storage, queue).values()) for queue in (QUEUE, PAIRS)]
        assert left == ([0, 0] if is_withdrawn else [4, 4])

    def test_incomplete_plan_is_given_up_after_a_week(self, storage: Storage) -> None:
        mine, manifests = begun(storage)
        place(storage).publish(manifests[0], [("a", 0)])

        assert not place(storage).leave(mine)
        self.advance(RESUMABLE // 2)
        assert place(storage).adopt(1_000, 10) == []
        assert not place(storage).leave(mine)
        self.advance(RESUMABLE // 2 + 2_000)

        assert place(storage).leave(mine)

    def test_left_plan_is_adopted_a_week_later(self, storage: Storage) -> None:
        mine, manifests = begun(storage)
        place(storage).publish(manifests[0], [("a", 0)])

        place(storage).leave(mine)
        self.advance(RESUMABLE + 2_000)

        assert place(storage).adopt(1_000, 10) == [mine]
        assert place(storage).leave(mine)

    def test_chunks_of_many_queues_are_published_together(self, storage: Storage) -> None:
        queues = [f"many-{number}" for number in range(150)]
        manifests = [staged(storage, {"a": [fresh(2, queue=queue)]}, queue=queue) for queue in queues]

        found = place(storage).begin_all(manifests, None)
        counts = place(storage).publish_all([(manifest, "a", 0) for manifest in manifests])
        again = place(storage).publish_all([(manifest, "a", 0) for manifest in manifests])

        assert [state.status for state in found] == ["new"] * 150
        assert counts == again == place(storage).end_all(manifests) == [Counts(queued=2)] * 150
        assert {storage.reads.counts(queue)[State.WAITING] for queue in queues} == {2}
        assert place(storage).forget_all(queues, APP, WRITE) >= 0

    def test_full_queue_does_not_undo_chunks_published_before_it(self, storage: Storage) -> None:
        small = staged(storage, {"a": [fresh(MAX_SIZE, queue=SMALL), fresh(1, queue=SMALL)]}, queue=SMALL)
        other = staged(storage, {"a": [fresh(2)]})
        place(storage).begin_all([small, other], None)
        chunks = [(other, "a", 0), (small, "a", 0), (small, "a", 1)]

        with pytest.raises(QueueFullError):
            place(storage).publish_all(chunks)
        claim(storage, 1, queues=(SMALL,))

        assert place(storage).publish_all(chunks) == [Counts(2), Counts(MAX_SIZE), Counts(1)]
        assert counts(storage)[State.WAITING] == 2


def begun(storage: Storage) -> tuple[Plan, list[Manifest]]:
    """Return a committed plan of two queues, and its manifests, which are stored."""
    manifests = [
        staged(storage, {"a": [fresh(2, queue=queue), fresh(2, queue=queue)]}, queue=queue)
        for queue in sorted((QUEUE, PAIRS))
    ]
    mine = plan({one.queue: one.parts for one in manifests}, lifetime=2 * RESUMABLE)
    place(storage).commit(mine)
    place(storage).begin_all(manifests, mine.lifetime)
    return mine, manifests
