"""Plans of bulk writes while the wall clock is set, for storages whose tests inject the clock."""

from djqueue.testing import contract
from djqueue.testing.contract.case import PAIRS
from djqueue.testing.contract.staging import place, plan
from djqueue.testing.factories import QUEUE


class StagingOnAClock(contract.StagingContract, contract.PlansContract):
    def test_clock_set_back_does_not_hide_a_plan_from_the_sweep(self, storage):
        first, left = plan({QUEUE: {"a": "p"}}), plan({PAIRS: {"b": "p"}}, target=PAIRS)
        place(storage).commit(first)
        place(storage).commit(left)
        place(storage).leave(left)

        self.clock.jump(-3_600_000)
        assert place(storage).adopt(1_000, 10) == []
        self.advance(2_000)

        assert place(storage).adopt(1_000, 10) == [first]
