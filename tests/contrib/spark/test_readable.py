"""Payloads as readable JSON."""

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from djqueue.codecs import MSGPACK, get_encoder
from djqueue.contrib.spark.readable import as_json


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"kwargs": {"n": 1, "ä": None}}, '{"kwargs": {"n": 1, "ä": null}}'),
        ({"at": datetime(2026, 1, 31, tzinfo=UTC)}, '{"at": "2026-01-31 00:00:00+00:00"}'),
        ([Decimal("1.50"), b"ab", (1, 2)], '["1.50", "YWI=", [1, 2]]'),
    ],
)
def test_payload_is_decoded_as_json(value, expected):
    assert as_json(get_encoder(MSGPACK)(value), MSGPACK) == expected


@pytest.mark.parametrize(("payload", "kind"), [(None, MSGPACK), (b"\xc1", MSGPACK), (b"x", "unknown")])
def test_payload_that_cannot_be_decoded_is_null(payload, kind):
    assert as_json(payload, kind) is None
