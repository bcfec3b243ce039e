"""Encoders by content type: size limits, and accepted content types."""

import hashlib
import pickle
import subprocess
import sys
from datetime import datetime
from decimal import Decimal
from threading import Barrier, Thread

import pytest

from djqueue import codecs
from djqueue.codecs import MSGPACK, content_id, decode, encode, get_encoder
from djqueue.core.errors import PayloadTooLargeError, SerializationError
from tests.support import PATIENCE

JSON = "application/json"
PICKLE = "application/x-python-serialize"


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
def test_error_for_too_large_value_names_both_sizes_and_the_setting(content_type):
    size = len(encode("x" * 1000, content_type))

    assert len(encode("x" * 1000, content_type, limit=size)) == size
    with pytest.raises(PayloadTooLargeError) as caught:
        encode("x" * 1000, content_type, limit=size - 1, what="result")
    assert str(caught.value).startswith(f"result: {size} bytes")
    assert f'DJQUEUE["MAX_PAYLOAD"] allows {size - 1}' in str(caught.value)


def test_json_values_use_the_kombu_codec(settings):
    value = {"at": datetime(2024, 5, 1), "price": Decimal("1.10"), "many": [1, None, "ü"]}

    assert decode(encode(value, JSON), JSON) == value
    assert decode(encode((1, 2), "json"), "json") == [1, 2]


def test_json_encoder_can_be_reused_for_many_values():
    encode_json = get_encoder(JSON, 100)

    assert [encode_json(n) for n in range(3)] == [b"0", b"1", b"2"]
    with pytest.raises(PayloadTooLargeError):
        encode_json("x" * 100)


def test_value_that_json_cannot_encode_is_rejected():
    with pytest.raises(SerializationError, match=r"^payload: cannot be encoded as json: .*set"):
        encode({1, 2}, JSON)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"__type__": [], "__value__": 1}', b"[" * 100_000])
def test_malformed_json_is_rejected(data):
    with pytest.raises(SerializationError, match=r"^not a value encoded as json: "):
        decode(data, JSON)


@pytest.mark.parametrize("content_type", [PICKLE, "pickle", "yaml", "application/x-msgpack", "x/y", ""])
def test_unlisted_content_type_is_rejected_for_encoding_and_decoding(content_type):
    for attempt in (
        lambda: encode({}, content_type),
        lambda: get_encoder(content_type),
        lambda: decode(b"x", content_type),
        lambda: decode(pickle.dumps(1), content_type, accept={JSON}),
    ):
        with pytest.raises(SerializationError, match="is not accepted") as caught:
            attempt()
        assert 'DJQUEUE["ACCEPT_CONTENT"]' in str(caught.value)
        assert JSON in str(caught.value)


def test_pickle_is_not_loaded_unless_it_is_listed(monkeypatch):
    ran = []
    monkeypatch.setattr(sys, "_djqueue_test", ran.append, raising=False)

    class Bomb:
        def __reduce__(self):
            return eval, ("__import__('sys')._djqueue_test(1)",)

    with pytest.raises(SerializationError):
        decode(pickle.dumps(Bomb()), PICKLE)
    assert ran == []


@pytest.mark.parametrize("listed", [PICKLE, "pickle"])
@pytest.mark.parametrize("content_type", [PICKLE, "pickle"])
def test_pickle_is_accepted_when_the_settings_list_it(settings, listed, content_type):
    settings.DJQUEUE = {"ACCEPT_CONTENT": [MSGPACK, listed]}

    assert decode(encode({1, 2}, content_type), content_type) == {1, 2}
    assert decode(pickle.dumps(1), content_type, accept=[listed]) == 1


def test_listed_but_unknown_content_type_is_rejected(settings):
    settings.DJQUEUE = {"ACCEPT_CONTENT": ["application/x-unheard-of"]}

    with pytest.raises(SerializationError, match="'application/x-unheard-of' is not accepted"):
        encode(1, "application/x-unheard-of")


def test_accept_list_applies_to_the_default_codec():
    data = encode(1, MSGPACK)

    assert decode(data, MSGPACK) == decode(data, "msgpack", accept=["msgpack"]) == 1
    with pytest.raises(SerializationError, match="allows: json"):
        decode(data, MSGPACK, accept=["json"])


def test_kombu_is_imported_only_when_it_is_used():
    code = (
        "import sys; from djqueue.codecs import encode, decode, MSGPACK;"
        "assert decode(encode((1,), MSGPACK), MSGPACK) == (1,);"
        "sys.exit(any(name.partition('.')[0] == 'kombu' for name in sys.modules))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_json_without_kombu_is_refused_with_the_extra_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "kombu", None)  # an import of it fails
    monkeypatch.delitem(sys.modules, "djqueue.codecs.registry", raising=False)
    monkeypatch.delattr(codecs, "registry", raising=False)

    assert decode(encode((1,), MSGPACK), MSGPACK) == (1,)
    for attempt in (lambda: encode([1], JSON), lambda: decode(b"[1]", JSON)):
        with pytest.raises(SerializationError, match=r'pip install "djqueue\[kombu\]"'):
            attempt()


def test_threads_can_share_an_encoder():
    encode_value = get_encoder(MSGPACK)
    start = Barrier(4)
    wrong = []

    def work(number):
        value = {"n": number, "parts": [(number, Decimal(number))] * 20, "text": str(number) * 50}
        expected = encode(value, MSGPACK)
        start.wait(PATIENCE)
        for turn in range(500):
            if turn % 50 == 0:
                with pytest.raises(SerializationError):
                    encode_value([value, {number}])
            if encode_value(value) != expected:
                wrong.append(number)

    threads = [Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert wrong == []


def test_encoder_is_reentrant(monkeypatch):
    from djqueue.codecs import msgpack

    encode_value = get_encoder(MSGPACK)
    inner = []

    def encode_decimal(value):
        inner.append(encode_value(["inside", value.adjusted()]))
        return str(value)

    monkeypatch.setitem(msgpack._ENCODERS, Decimal, encode_decimal)

    assert decode(encode_value([1, Decimal("7.5"), 2]), MSGPACK) == [1, "7.5", 2]
    assert decode(inner[0], MSGPACK) == ["inside", 0]


def test_content_id_is_derived_from_canonical_json():
    text = '{"a":[1,2.5,null,true],"ü":"é"}'

    expected = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert content_id({"ü": "é", "a": [1, 2.5, None, True]}) == expected
    assert content_id({"a": [1, 2.5, None, True], "ü": "é"}) == expected
    assert content_id({"a": 1}) != content_id({"a": 2})


@pytest.mark.parametrize("value", [{1}, float("nan"), "\ud800", {1: 1, "a": 2}, b"x"], ids=repr)
def test_content_id_rejects_values_that_are_not_json(value):
    with pytest.raises(SerializationError, match="the id cannot be derived"):
        content_id(value)
