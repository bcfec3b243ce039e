"""MIRROR and STREAM in OPTIONS."""

from datetime import timedelta

import pytest

from djqueue.core.errors import ConfigurationError
from djqueue.core.policies import Keep
from djqueue.core.states import State
from djqueue.storage.redis.options import MirrorOptions, RedisOptions

DAY = 86_400_000


def test_by_default_all_states_are_mirrored_and_kept_for_a_week():
    assert RedisOptions.read({}).mirror == MirrorOptions(states=frozenset(State), retention=7 * DAY)


def test_mirrored_states_and_retention_can_be_chosen():
    mirror = {"STATES": ["failed", State.ACTIVE], "RETENTION": timedelta(days=1)}

    options = RedisOptions.read({"MIRROR": mirror})

    assert options.mirror == MirrorOptions(states=frozenset({State.FAILED, State.ACTIVE}), retention=DAY)
    assert RedisOptions.read({"MIRROR": {"RETENTION": 1.5}}).mirror.retention == 1_500


def test_maximum_lag_of_the_tables_can_be_chosen():
    assert RedisOptions.read({}).mirror.max_lag == 10_000
    assert RedisOptions.read({"MIRROR": {"MAX_LAG": timedelta(seconds=2)}}).mirror.max_lag == 2_000
    assert RedisOptions.read({"MIRROR": {"MAX_LAG": 0}}).mirror.max_lag == 0


def test_rows_of_ended_jobs_can_be_limited():
    keep = {"COMPLETED": {"COUNT": 10, "AGE": timedelta(hours=1)}, "FAILED": {"COUNT": 0, "AGE": None}}

    found = RedisOptions.read({"MIRROR": {"KEEP": keep}}).mirror.keep

    assert found == {State.COMPLETED: Keep(age=3_600_000, count=10), State.FAILED: Keep(count=0)}


@pytest.mark.parametrize("given", [{"MIRROR": False}, {"STREAM": 0}, {"STREAM": 0, "MIRROR": {}}])
def test_disabling_the_mirror_disables_the_stream_and_vice_versa(given):
    options = RedisOptions.read(given)

    assert (options.mirror, options.stream) == (None, 0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (7, "expected a dict or False"),
        ({"STATE": []}, "did you mean 'STATES'"),
        ({"STATES": "failed"}, "expected a list of states"),
        ({"STATES": ["faild"]}, "did you mean 'failed'"),
        ({"STATES": [[]]}, "is not a state"),
        ({"RETENTION": -1}, "RETENTION"),
        ({"RETENTION": "1d"}, "RETENTION"),
        ({"MAX_LAG": -1}, "MAX_LAG"),
        ({"MAXLAG": 1}, "did you mean 'MAX_LAG'"),
        ({"KEEP": 7}, "KEEP: expected a dict"),
        ({"KEEP": {"COMPLETE": {}}}, "did you mean 'COMPLETED'"),
        ({"KEEP": {"WAITING": {}}}, "KEEP: unknown key 'WAITING'"),
        ({"KEEP": {"FAILED": {"BYTES": 1}}}, "FAILED: unknown key 'BYTES'"),
        ({"KEEP": {"FAILED": {"COUNT": -1}}}, "FAILED: COUNT"),
        ({"KEEP": {"FAILED": {"COUNT": True}}}, "FAILED: COUNT"),
        ({"KEEP": {"FAILED": {"AGE": 0}}}, "FAILED: AGE"),
        ({"KEEP": {"FAILED": {"AGE": "1d"}}}, "FAILED: AGE"),
    ],
)
def test_invalid_mirror_option_is_named(given, words):
    with pytest.raises(ConfigurationError, match=words) as refused:
        RedisOptions.read({"MIRROR": given})

    assert "MIRROR" in str(refused.value)
