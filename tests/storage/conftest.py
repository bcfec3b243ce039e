"""Shared setup of the storage tests."""

import pytest

# As the plugin does where it is installed: a failing case shows its values.
pytest.register_assert_rewrite("djqueue.testing.contract", "djqueue.testing.waiting")
