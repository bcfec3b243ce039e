"""What is said of a write: read, checked, and refused by name."""

import pytest

from djqueue.contrib.spark.options import PER_JOB, WriteOptions
from djqueue.core.errors import OptionError

GIVEN = {"url": "redis://127.0.0.1/0", "queue": "emails", "job": "shop.jobs.send"}


def test_names_are_not_case_sensitive():
    read = WriteOptions.read(
        {"URL": "redis://x", "QUEUE": "q", "Job": "j", "maxattempts": "5", "UNIQUEKEYCOLUMN": "k"}
    )

    assert (read.url, read.queue, read.job) == ("redis://x", "q", "j")
    assert read.constants == {"max_attempts": 5}
    assert read.columns == {"unique_key": "k"}


def test_values_are_what_their_texts_mean():
    read = WriteOptions.read(
        {
            **GIVEN,
            "priority": "-3",
            "delay": "1.5",
            "tags": "a, b",
            "lifo": "TRUE",
            "subject": "shop.order:7",
            "runAtColumn": "at",
            "txnAppId": "nightly",
            "txnVersion": "7",
            "batchSize": "100",
        }
    )

    assert read.constants == {
        "priority": -3,
        "delay": 1_500,
        "tags": ("a", "b"),
        "lifo": True,
        "subject": "shop.order:7",
    }
    assert (read.app, read.version, read.batch_size) == ("nightly", 7, 100)


@pytest.mark.parametrize("option", PER_JOB)
def test_every_option_of_a_job_may_come_from_a_column(option):
    head, *rest = option.split("_")
    name = head + "".join(word.title() for word in rest)

    assert WriteOptions.read({**GIVEN, f"{name}Column": "c"}).columns == {option: "c"}


WRONG = [
    ({"queu": "x"}, "unknown option 'queu'; did you mean 'queue'"),
    ({"prioritty": "1"}, "unknown option 'prioritty'; did you mean 'priority'"),
    ({"priority": "high"}, "priority: 'high' is not a number"),
    ({"priority": "1e9"}, "priority: '1e9' is not a number"),
    ({"delay": "nan"}, "delay: "),
    ({"delay": "-1"}, "delay: "),
    ({"lifo": "maybe"}, "lifo: 'maybe' is neither true nor false"),
    ({"queue": "x" * 256}, "queue: has 256 characters"),
    ({"txnAppId": "a"}, "txnAppId and txnVersion: both, or neither"),
    ({"txnVersion": "1"}, "txnAppId and txnVersion: both, or neither"),
    ({"txnAppId": "a", "txnVersion": "-1"}, "txnVersion: -1 is not a number from 0"),
    ({"deliveryMode": "once"}, "deliveryMode: 'once' is not one of staged, direct"),
    ({"onError": "ignore"}, "onError: 'ignore' is not one of fail, skip"),
    ({"batchSize": "0"}, "batchSize: 0 is not a number from 1"),
    ({"rateLimit": "inf"}, "rateLimit: inf is not a number"),
    ({"group": "g", "groupColumn": "c"}, "group: it is said for all jobs, and as a column"),
    ({"maxAttempts": "0"}, "maxAttempts: 0 is not from 1"),
]


@pytest.mark.parametrize(
    ("more", "message"), WRONG, ids=[next(iter(more)) + str(at) for at, (more, _) in enumerate(WRONG)]
)
def test_what_is_wrong_is_named(more, message):
    with pytest.raises(OptionError) as raised:
        WriteOptions.read({**GIVEN, **more})

    assert message in str(raised.value)


@pytest.mark.parametrize("missing", ["url", "queue", "job"])
def test_what_is_missing_is_named(missing):
    with pytest.raises(OptionError, match=f"{missing}: say"):
        WriteOptions.read({name: value for name, value in GIVEN.items() if name != missing})
