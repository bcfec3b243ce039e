"""How many values a frame may hold: counted before any of them is made."""

import subprocess
import sys
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djqueue.core.errors import SerializationError
from djqueue.storage import wire
from djqueue.storage.journaled import JournaledStorage
from djqueue.storage.journaled.framing import connect
from djqueue.storage.scan import has_more_values
from djqueue.storage.wire import LENGTH, MAX_VALUES, pack, unpack_frame
from djqueue.testing.factories import QUEUE, batch, enqueue
from tests.support import PATIENCE, eventually

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=20)
        | st.dictionaries(st.text(max_size=5), inner, max_size=20)
        | st.tuples(inner)
        | st.frozensets(scalars, max_size=3)
    ),
    max_leaves=20,
)


def count(value: Any) -> int:
    """Count the values of a frame without tuples, sets and records."""
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    if isinstance(value, dict):
        return 1 + sum(count(key) + count(item) for key, item in value.items())
    return 1


plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
    max_leaves=20,
)


@given(plain)
def test_values_are_counted_exactly(value: Any) -> None:
    body, found = msgpack.packb(value), count(value)

    # The last five bytes of a body are not looked into.
    assert not has_more_values(body, found)
    for limit in range(1, max(found - 6, 1)):
        assert has_more_values(body, limit)


@settings(max_examples=20)
@given(st.lists(values, min_size=30, max_size=31))
def test_values_inside_tuples_sets_and_records_count(value: list[Any]) -> None:
    body = wire.pack_body((tuple(value), batch("x", payloads=[b"x"])))

    assert has_more_values(body, 20)
    assert not has_more_values(body, 100 * len(body))


@given(st.binary(max_size=400), st.integers(1, 50))
def test_bytes_that_are_no_frame_are_counted_too(body: bytes, limit: int) -> None:
    assert has_more_values(body, limit) in (False, True)


@pytest.mark.parametrize("code", [wire.STATE, wire.VALUE, wire.TUPLE, 99])
def test_values_after_malformed_extension_are_counted(code: int) -> None:
    """Its body claims four gigabytes of text: what follows is decoded, and so it is counted."""
    hiding = msgpack.packb(msgpack.ExtType(code, b"\xdb\xff\xff\xff\xff" + b"x" * 11))
    body = b"\xdd" + (5_001).to_bytes(4, "big") + hiding + b"\x90" * 5_000

    assert has_more_values(body, 4_000)


@pytest.mark.parametrize("value", [b"\x90", b"\x80", b"\xc0", b"\xa0", b"\xc4\x00"], ids=repr)
@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "in an extension"])
def test_frame_with_too_many_values_is_rejected(value: bytes, wrap: bool) -> None:
    body = b"\xdd" + (MAX_VALUES + 10).to_bytes(4, "big") + value * (MAX_VALUES + 10)
    if wrap:
        body = msgpack.packb(msgpack.ExtType(wire.TUPLE, body))

    with pytest.raises(SerializationError, match="more than 2,000,000 values; request fewer jobs at a time"):
        unpack_frame(body)


def test_sender_of_too_many_values_receives_error(
    client: JournaledStorage, scheduler: JournaledStorage
) -> None:
    with pytest.raises(SerializationError, match="more than 2,000,000 values"):
        client._client._remote.call("reads.states", QUEUE, [""] * (MAX_VALUES + 10))

    assert client._client._remote.call("reads.states", QUEUE, ["id"]) == [None]


def test_ids_fill_frame_before_their_number_counts() -> None:
    ids = ["01932f5e-7c00-7000-8000-000000000000"] * (wire.MAX_FRAME // 38 - 10)

    assert len(unpack_frame(pack(ids)[LENGTH.size :])) == len(ids)


def test_frame_of_empty_lists_ends_its_connection_alone(
    scheduler: JournaledStorage, client: JournaledStorage
) -> None:
    assert scheduler._server is not None
    job_id = enqueue(client)
    size = 20_000_000
    with connect(scheduler._server.address) as stranger:
        stranger.sendall(LENGTH.pack(size + 5) + b"\xdd" + size.to_bytes(4, "big"))
        for _ in range(20):
            stranger.sendall(b"\x90" * 1_000_000)
        stranger.settimeout(PATIENCE)
        assert stranger.recv(1_000) == b""

    eventually(lambda: client._client._remote.call("reads.states", QUEUE, [job_id])[0] is not None)


MEMORY = """
import resource
import django
django.setup()
from djqueue.core.errors import SerializationError
from djqueue.storage.wire import unpack_frame
body = b"\\xdd" + (20_000_000).to_bytes(4, "big") + b"\\x90" * 20_000_000
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    unpack_frame(body)
except SerializationError:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads kilobytes of Linux's getrusage")
def test_refusing_frame_of_empty_lists_takes_no_memory() -> None:
    said = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=PATIENCE, check=True
    )

    assert int(said.stdout) < 10_000
