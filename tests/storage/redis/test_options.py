"""OPTIONS of the settings that apply to all queues."""

from contextlib import closing

import pytest

from djqueue.client.storages import make_storage
from djqueue.conf import read_settings
from djqueue.core.errors import ConfigurationError

BACKEND = "djqueue.storage.redis.RedisStorage"


def leases(settings, *queues):
    """In seconds."""
    with closing(make_storage(read_settings(settings))) as storage:
        return [storage.policy(queue).lease / 1_000 for queue in queues]


@pytest.mark.parametrize("name", ["LEASE", "lease"])
def test_lease_option_applies_to_queues_without_their_own_lease(name):
    settings = {
        "QUEUES": {"named": {"RATE": "5/s"}, "own": {"LEASE": 90}},
        "STORAGE": {"BACKEND": BACKEND, "OPTIONS": {"URL": "redis://nowhere", name: 60}},
    }

    assert leases(settings, "named", "own", "other") == [60, 90, 60]


def test_default_lease_is_half_a_minute():
    storage = {"BACKEND": BACKEND, "OPTIONS": {"URL": "redis://nowhere"}}

    assert leases({"STORAGE": storage, "QUEUES": ["named"]}, "named", "other") == [30, 30]


def test_lease_option_applies_to_queues_without_settings():
    storage = {"BACKEND": BACKEND, "OPTIONS": {"URL": "redis://nowhere", "LEASE": 60}}

    assert leases({"STORAGE": storage, "QUEUES": ["named"]}, "named") == [60]


@pytest.mark.parametrize("lease", ["long", 0])
def test_invalid_lease_option_is_rejected(lease):
    storage = {"BACKEND": BACKEND, "OPTIONS": {"URL": "redis://nowhere", "LEASE": lease}}

    with pytest.raises(ConfigurationError, match="LEASE"):
        leases({"STORAGE": storage, "QUEUES": ["named"]}, "named")
