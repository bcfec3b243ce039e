"""Frames of the scheduler's socket: what goes in comes out, and nothing else does."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djqueue.core.backoff import Backoff
from djqueue.core.errors import SerializationError
from djqueue.core.groups import GroupWords
from djqueue.core.headers import Headers
from djqueue.core.job import Batch
from djqueue.core.limiter import Rate
from djqueue.core.options import JobOptions
from djqueue.core.states import State
from djqueue.storage import wire
from djqueue.storage.base import Storage
from djqueue.storage.wire import LENGTH, MAX_DEPTH, MAX_FRAME, RECORDS, pack, unpack
from djqueue.testing.factories import batch

TEXTS = st.text(st.characters())  # halves of surrogate pairs are among them
INTEGERS = st.integers(-(2**63), 2**64 - 1)
FLOATS = st.floats(allow_nan=False)
MOMENTS = (
    st.datetimes()
    | st.datetimes(timezones=st.just(UTC))
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.uuids()
)
PROGRESS = st.recursive(
    st.none() | st.booleans() | INTEGERS | FLOATS | TEXTS | st.binary() | MOMENTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
PLAIN = {
    Any: PROGRESS,
    str: TEXTS,
    int: INTEGERS,
    bool: st.booleans(),
    float: FLOATS,
    bytes: st.binary(),
    NoneType: st.none(),
    State: st.sampled_from(State),
    Rate: st.builds(Rate, INTEGERS, INTEGERS),
    Backoff: st.builds(Backoff, kind=TEXTS, base=INTEGERS, factor=FLOATS, cap=INTEGERS, jitter=FLOATS),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values that fit an annotation of the contract."""
    if kind in PLAIN:
        return PLAIN[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return st.one_of(map(values_of, arguments))
    if origin in (list, Sequence):
        return st.lists(values_of(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(*map(values_of, arguments), max_size=3)
    if origin is frozenset:
        return st.frozensets(values_of(arguments[0]), max_size=3)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name not in ("plain", "kept")}
    fields = {name: st.deferred(lambda hint=hint: values_of(hint)) for name, hint in hints.items()}
    return st.builds(kind, **fields)


def back(value: Any) -> Any:
    """What the other side gets."""
    frame = pack(value)
    [length] = LENGTH.unpack(frame[: LENGTH.size])
    assert length == len(frame) - LENGTH.size
    return unpack(frame[LENGTH.size :])


def goes_over(value: Any) -> None:
    found = back(value)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("examples", [5, pytest.param(100, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("cls", [*RECORDS, JobOptions, Rate, State], ids=lambda cls: cls.__name__)
def test_contract_record_round_trips(cls: type, examples: int) -> None:
    @settings(max_examples=examples)
    @given(values_of(cls))
    def check(value: Any) -> None:
        goes_over(value)

    check()


@given(
    st.recursive(
        st.none() | st.booleans() | INTEGERS | TEXTS | st.binary() | st.sampled_from(State) | st.dates(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.frozensets(st.tuples(TEXTS, INTEGERS), max_size=3)
            | st.dictionaries(TEXTS | INTEGERS | st.sampled_from(State), inner, max_size=3)
        ),
    )
)
def test_nested_containers_keep_their_kinds(value: Any) -> None:
    goes_over(value)


def test_request_round_trips() -> None:
    goes_over([7, "enqueue", [[batch(2, priority=5, tags=("a", "b"), ids=["x", "y"])]], {}])


def test_every_type_of_contract_operations_can_be_sent() -> None:
    known = {*RECORDS, State, Rate, JobOptions}
    operations = [getattr(Storage, name) for name in Storage.__abstractmethods__]
    named = {
        cls
        for operation in operations
        for hint in get_type_hints(operation).values()
        for cls in classes_in(hint)
    }

    assert known <= reachable(named) | known
    # Backoff and headers go over within the options, the words of a call one by one.
    assert not reachable(named) - known - {Backoff, Headers, GroupWords}


def classes_in(hint: Any) -> set[type]:
    """djqueue's own classes in an annotation."""
    found = set().union(*map(classes_in, get_args(hint))) if get_args(hint) else set()
    if inspect.isclass(hint) and hint.__module__.startswith("djqueue."):
        found.add(hint)
    return found


def reachable(classes: set[type]) -> set[type]:
    """These and the classes of their fields."""
    inside = {
        field
        for cls in classes
        if cls is not State
        for hint in get_type_hints(cls).values()
        for field in classes_in(hint)
    }
    return classes if inside <= classes else reachable(classes | inside)


# What is no frame.


def unpacks_or_refuses(body: bytes) -> None:
    """Nothing but a SerializationError is ever raised."""
    with suppress(SerializationError):
        unpack(body)


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_serialization_error(body: bytes) -> None:
    unpacks_or_refuses(body)


@given(st.integers(-128, 127), st.binary(max_size=50) | PROGRESS.map(lambda value: pack(value)[4:]))
def test_random_extensions_raise_nothing_but_serialization_error(code: int, data: bytes) -> None:
    unpacks_or_refuses(extension(code, data))


@settings(max_examples=25)
@given(values_of(Batch), st.data())
def test_damaged_frame_raises_nothing_but_serialization_error(value: Any, data: st.DataObject) -> None:
    body = bytearray(pack(value)[LENGTH.size :])
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    unpacks_or_refuses(bytes(body))


@settings(max_examples=25)
@given(values_of(Batch), st.data())
def test_truncated_frame_is_rejected(value: Any, data: st.DataObject) -> None:
    body = pack(value)[LENGTH.size :]
    with pytest.raises(SerializationError, match="not a djqueue frame"):
        unpack(body[: data.draw(st.integers(0, len(body) - 1))])


def extension(code: int, data: bytes) -> bytes:
    """ext 32 by hand: `msgpack.ExtType` makes none with a negative code."""
    return b"\xc9" + LENGTH.pack(len(data)) + code.to_bytes(1, "big", signed=True) + data


@pytest.mark.parametrize("code", [0, 8, 15, wire.FIRST_RECORD + len(RECORDS), 127, -2, -128])
def test_unknown_extension_is_rejected(code: int) -> None:
    with pytest.raises(SerializationError, match=f"unknown value {code} in a frame"):
        unpack(extension(code, msgpack.packb([1, 2])))


def test_messagepack_timestamp_is_read_as_datetime() -> None:
    found = unpack(extension(-1, LENGTH.pack(86_400)))

    assert found == datetime(1970, 1, 2, tzinfo=UTC)
    goes_over(found)


@pytest.mark.parametrize(
    "body",
    [
        extension(wire.FIRST_RECORD, msgpack.packb(["too", "few"])),
        extension(wire.FROZENSET, msgpack.packb([[], {}])),
        extension(wire.STATE, b"asleep"),
        extension(wire.OPTIONS, msgpack.packb({"backoff": {"no": "such"}})),
        extension(wire.RATE, msgpack.packb([1, 2, 3])),
        extension(wire.VALUE, b"\xc1"),
        b"\xdd\xff\xff\xff\xff",
        pack(None)[4:] * 2,
        b"",
    ],
    ids=["record", "frozenset", "state", "options", "rate", "value", "huge list", "two values", "nothing"],
)
def test_malformed_value_is_rejected(body: bytes) -> None:
    with pytest.raises(SerializationError):
        unpack(body)


@pytest.mark.parametrize(
    "deepen", [lambda body: b"\x91" + body, lambda body: extension(wire.TUPLE, b"\x91" + body)]
)
def test_frame_of_endless_depth_is_rejected(deepen: Callable[[bytes], bytes]) -> None:
    body = b"\xc0"
    for _ in range(5_000):
        body = deepen(body)

    with pytest.raises(SerializationError):
        unpack(body)


# What is refused at the sender's.


def test_oversized_value_is_rejected() -> None:
    with pytest.raises(SerializationError, match=f"a frame of {MAX_FRAME + 5} bytes exceeds the limit"):
        pack(bytes(MAX_FRAME))


def test_value_of_maximum_size_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    value = [batch(payloads=[bytes(1_000)])]
    size = len(pack(value)) - LENGTH.size

    monkeypatch.setattr(wire, "MAX_FRAME", size)
    goes_over(value)
    monkeypatch.setattr(wire, "MAX_FRAME", size - 1)
    with pytest.raises(SerializationError, match=f"exceeds the limit of {size - 1}"):
        pack(value)


class Foreign:
    """Of no contract."""


class Text(str):
    """A text by class, but not by type."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Foreign(), "Foreign cannot be sent over"),
        ([Text("a")], "Text cannot be sent over"),
        ({"n": 2**64}, "cannot be sent over"),
        (batch(priority=-(2**63) - 1), "cannot be sent over"),
        ({1, 2}, "set cannot be sent over"),
        (ValueError("no"), "ValueError cannot be sent over"),
    ],
    ids=["object", "subclass", "integer", "integer in options", "set", "error"],
)
def test_value_outside_contract_is_rejected(value: Any, why: str) -> None:
    with pytest.raises(SerializationError, match=why):
        pack(value)


def test_value_that_contains_itself_is_rejected() -> None:
    value: list[Any] = []
    value.append(value)

    with pytest.raises(SerializationError, match="cannot be sent over"):
        pack(value)


def nested(depth: int) -> Any:
    value: Any = "innermost"
    for _ in range(depth):
        value = (value,)
    return value


def test_tuples_nest_as_deep_as_either_side_can_read() -> None:
    goes_over([nested(MAX_DEPTH)])
    with pytest.raises(SerializationError, match=f"nested deeper than {MAX_DEPTH} levels"):
        pack([nested(MAX_DEPTH + 1)])
