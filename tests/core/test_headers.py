"""Headers: valid values, immutability and rejections."""

import pickle

import pytest

from djqueue.core.errors import OptionError, SerializationError
from djqueue.core.headers import MAX_BYTES, MAX_HEADERS, NO_HEADERS, Headers, parse_headers


def parse(value):
    return parse_headers("headers", value)


def test_header_values_keep_their_types():
    given = {"s": "ü", "i": 2**63 - 1, "f": 1.0, "b": True, "n": None, "l": [1, [], {}], "d": {"a": {}}}

    headers = parse(given)

    assert dict(headers) == given
    assert [type(value) for value in headers.values()] == [type(value) for value in given.values()]
    assert dict(pickle.loads(pickle.dumps(headers))) == given


def test_tuple_header_becomes_a_list():
    assert parse({"timelimit": (None, 300)})["timelimit"] == [None, 300]


def test_empty_headers_are_one_shared_object():
    assert parse({}) is NO_HEADERS
    assert not NO_HEADERS
    assert len(NO_HEADERS) == 0
    assert dict(NO_HEADERS) == {}


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0, False), ([1], [True])])
def test_equal_values_of_different_types_are_different_headers(one, other):
    assert parse({"n": one}) != parse({"n": other})


def test_lists_in_headers_are_copies():
    headers = parse({"stamps": ["a"], "options": {"x": [1]}})

    headers["stamps"].append("b")
    headers["options"]["x"].append(2)

    assert dict(headers) == {"stamps": ["a"], "options": {"x": [1]}}


def test_headers_are_immutable():
    with pytest.raises(TypeError):
        parse({"a": 1})["a"] = 2


def test_repr_of_headers_shows_names_only():
    headers = parse({"authorization": "Bearer hush", "tenant": 7})

    assert repr(headers) == "<Headers: 'authorization', 'tenant'>"
    assert repr(parse({})) == "<Headers>"


def test_merged_headers_replace_those_of_the_same_name():
    one = parse({"a": 1, "b": 2})

    assert dict(one.merged({"b": 3, "c": 4})) == {"a": 1, "b": 3, "c": 4}
    assert dict(one.merged(Headers('{"a":null}'))) == {"a": None, "b": 2}
    assert dict(one) == {"a": 1, "b": 2}


def itself():
    entries = []
    entries.extend([entries] * 1_000)
    return entries


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({str(number): 1 for number in range(MAX_HEADERS + 1)}, "at most 64 headers; got 65"),
        ({"a": 1, "huge": "x" * MAX_BYTES}, "'huge' makes the headers of the job larger than 8,192 bytes"),
        ({"a": 1, "wide": "ü" * 4_096}, "'wide' makes the headers of the job larger than 8,192 bytes"),
        ({"many": list(range(10_000))}, "'many' makes the headers of the job larger than 8,192 bytes"),
        ({"deep": [[[[[[[[[1]]]]]]]]]}, "'deep' is nested more than 8 levels"),
        ({"loop": itself()}, "'loop' is nested more than 8 levels"),
        ({"a": float("inf")}, "'a' has the number inf"),
        ({"a": 2**63}, "'a' has an integer of more than 64 bits"),
        ({"a": [10**5_000]}, "'a' has an integer of more than 64 bits"),
        ({"a": {1: 2}}, "'a' has the key 1; keys must be strings"),
        (
            {"a": {"x": b""}},
            "'a' must be a string, number, boolean, None, or a list or dict of these; got a b",
        ),
        ({"a": "\ud800"}, "'a' is not valid Unicode"),
        ({"a\ud800": 1}, r"'a\\ud800' is not valid Unicode"),
        ({"x" * 256: 1}, "1 to 255 characters"),
        ([("a", 1)], "expected a dict of names and values, got a list"),
    ],
)
def test_rejection_names_the_header_and_is_short(value, message):
    with pytest.raises(OptionError, match=f"^headers: .*{message}") as refusal:
        parse(value)
    assert len(str(refusal.value)) < 500


def test_rejection_does_not_show_header_values():
    with pytest.raises(OptionError) as refusal:
        parse({"authorization": ["Bearer hunter2", b"hunter2"]})
    assert "hunter2" not in str(refusal.value)


def test_headers_of_exactly_the_limit_are_accepted():
    size = MAX_BYTES - len('{"a":""}')
    assert len(parse({"a": "x" * size})["a"]) == size
    with pytest.raises(OptionError, match="'a' makes"):
        parse({"a": "x" * (size + 1)})


@pytest.mark.parametrize("text", ["{", "[1]", "5", "[" * 100_000, '{"a": ' + "9" * 5_000 + "}", 5])
def test_malformed_stored_headers_raise_serialization_error(text):
    headers = Headers(text)

    with pytest.raises(SerializationError, match=r"^headers: "):
        dict(headers)
