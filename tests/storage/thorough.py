"""Longer runs of the contract's state machine, for nights and releases."""

import pytest


class ManyExamples:
    """Before a contract: twenty times as many examples, and others in each run."""

    @pytest.mark.thorough
    def test_many_random_operations_behave_like_the_reference(self, storage):
        self.run_machine(storage, 20 * self.examples)


def contract_part(item: pytest.Item) -> str:
    """Return the module of the storage contract that a test comes from; "" for any other test."""
    module = item.function.__module__ if isinstance(item, pytest.Function) else ""
    package, _, name = module.rpartition(".")
    return name if package == "djqueue.testing.contract" else ""
