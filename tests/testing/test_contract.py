"""The conformance suite itself."""

from collections import Counter

from djqueue.testing.contract import StorageContract


def test_no_part_of_the_contract_overrides_a_test_of_another_part():
    names = Counter(name for part in StorageContract.__bases__ for name in vars(part))

    assert [name for name, count in names.items() if name.startswith("test_") and count > 1] == []
