"""Longer runs of the contract's state machine, for nights and releases."""

import pytest


class ManyExamples:
    """Before a contract: twenty times as many examples, and others in each run."""

    @pytest.mark.thorough
    def test_many_random_operations_behave_like_the_reference(self, storage):
        self.run_machine(storage, 20 * self.examples)
