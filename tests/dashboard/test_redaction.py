"""Secrets are hidden by their names, at any depth."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djqueue import job
from djqueue.codecs import MSGPACK, encode
from djqueue.core.messages import ThrottledLog
from djqueue.core.options import JobOptions
from djqueue.dashboard import redaction, rendering
from djqueue.dashboard.views import editing
from djqueue.errors import OptionError
from tests.core.making import make_job

pytestmark = pytest.mark.django_db

WORDS = ("password", "*key")
plain = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
values = st.recursive(
    plain, lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=5), parts, max_size=3)
)


@job(name="tests.redaction.pay")
def pay(order, card_token, *others):
    """Registered, so that its parameters' names are known."""


@pytest.fixture(autouse=True)
def _nothing_was_logged_before(monkeypatch):
    monkeypatch.setattr(redaction, "problems", ThrottledLog(redaction.logger, redaction.PAUSE))


def record(name, value):
    made = make_job(name=name)
    made.payload = encode(value, MSGPACK)
    made.options = JobOptions()
    return made.record()


@given(values)
def test_secret_is_hidden_at_any_depth(value):
    shown = redaction.redact([{"deep": ({"Password_1": value, "api_key": value},)}], WORDS)
    assert [repr(one) for one in shown[0]["deep"][0].values()] == ["•••", "•••"]
    assert redaction.has_secrets(shown)


@given(values)
def test_value_without_secret_name_is_shown_unchanged(value):
    named = {"monkeys": value, "keys": [value]}
    if not redaction.has_secrets(redaction.redact(value, WORDS)):
        assert redaction.redact(named, WORDS) == named


def test_positional_arguments_are_hidden_by_parameter_name():
    found = redaction.payload(
        record("tests.redaction.pay", {"args": [42, "tok", "more"], "kwargs": {"email": "a@b.c", "n": 1}}),
        revealed=False,
    )
    assert repr(found) == "{'args': [42, •••, 'more'], 'kwargs': {'email': •••, 'n': 1}}"


def test_positional_arguments_of_unknown_function_are_hidden():
    given_ = {"args": [42], "kwargs": {}}
    assert (
        repr(redaction.payload(record("gone.job", given_), revealed=False)) == "{'args': [•••], 'kwargs': {}}"
    )
    assert redaction.payload(record("gone.job", given_), revealed=True) == given_


def mask(value, part):
    """Shows the last digits, of what was paid nothing, and calls a password by another name."""
    if part == "result":
        raise LookupError(f"no mask for {value}")
    plate = value["kwargs"].pop("plate")
    return {"args": value["args"], "kwargs": {**value["kwargs"], "plate": plate[-4:], "password": plate}}


@job(name="tests.redaction.refund", redact=mask)
def refund(order, *, plate):
    """Knows itself what of it may be shown."""


REFUND = {"args": [42], "kwargs": {"plate": "TXL-9922051"}}


def test_redact_function_and_settings_both_hide_values():
    made = record("tests.redaction.refund", REFUND)

    shown = redaction.payload(made, revealed=False)

    assert repr(shown) == "{'args': [42], 'kwargs': {'plate': '2051', 'password': •••}}"
    assert redaction.payload(made, revealed=True) == REFUND


def test_masked_value_can_be_revealed():
    @job(name="tests.redaction.masked", redact=lambda value, part: "masked")
    def masked():
        pass

    @job(name="tests.redaction.open", redact=lambda value, part: value)
    def all_open():
        pass

    for name, hides in (("masked", True), ("open", False)):
        made = record(f"tests.redaction.{name}", {"a": 1})
        shown = redaction.payload(made, revealed=False)
        assert redaction.hides(made, made.payload, shown) is hides


def test_failure_of_redact_function_hides_the_value_and_is_logged_without_it(caplog):
    made = record("tests.redaction.refund", 1)._replace(result=encode("hunter2", MSGPACK))

    with caplog.at_level(logging.ERROR, "djqueue.dashboard"):
        shown = redaction.result(made, revealed=False)

    assert repr(shown) == "•••"
    assert redaction.hides(made, made.result, shown)
    assert "tests.redaction.refund failed at" in caplog.text
    assert "LookupError" in caplog.text
    assert "hunter2" not in caplog.text


class Unprintable:
    """Neither shown nor compared without an error."""

    def __repr__(self):
        raise RuntimeError

    __eq__ = __ne__ = __repr__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class NamelessType(type):
    """A class whose name cannot be read."""

    def __getattribute__(cls, name):
        raise RuntimeError(name)


class NamelessError(Exception, metaclass=NamelessType):
    """Raised by a redact function."""


@pytest.mark.parametrize("raised", [SystemExit(3), NamelessError(), MemoryError()])
def test_whatever_a_redact_function_raises_hides_the_value(raised, caplog):
    def fails(value, part):
        raise raised

    job(name="tests.redaction.fails", redact=fails)(lambda: None)

    made = record("tests.redaction.fails", {"a": 1})
    assert [repr(redaction.payload(made, revealed=False)) for _ in range(3)] == ["•••"] * 3
    assert len([line for line in caplog.messages if "tests.redaction.fails failed at" in line]) <= 1


def test_objects_that_a_redact_function_returns_break_no_page():
    job(name="tests.redaction.objects", redact=lambda value, part: {"args": [Unprintable()], "kwargs": {}})(
        lambda one: None
    )
    made = record("tests.redaction.objects", {"args": [1], "kwargs": {}})

    shown = redaction.payload(made, revealed=False)

    assert "Unprintable" in rendering.text(shown["args"][0])
    assert rendering.text(shown) == "{\n    'args': <builtins.list>,\n    'kwargs': {},\n}"
    assert redaction.payload_line(made) == f"one={rendering.text(shown['args'][0])}"
    assert redaction.hides(made, made.payload, shown)


def test_slow_redact_function_keeps_only_one_page_waiting(monkeypatch, caplog):
    monkeypatch.setattr(redaction, "SLOW", 0)
    calls = []
    job(name="tests.redaction.slow", redact=lambda value, part: calls.append(part) or value)(lambda: None)
    made = record("tests.redaction.slow", {"a": 1})

    shown = [repr(redaction.payload(made, revealed=False)) for _ in range(3)]

    assert (shown, calls) == (["{'a': 1}", "•••", "•••"], ["payload"])
    assert "The redact function of tests.redaction.slow took" in caplog.text


@pytest.mark.parametrize("answer", [{"args": 5, "kwargs": {}}, {"args": None, "kwargs": None}])
def test_value_is_hidden_if_redact_function_does_not_return_a_call(answer):
    @job(name="tests.redaction.odd", redact=lambda value, part: answer)
    def odd():
        pass

    assert repr(redaction.payload(record("tests.redaction.odd", REFUND), revealed=False)) == "•••"


def test_job_with_other_options_keeps_its_redact_function():
    assert refund.using(priority=3).redact_function is mask


def test_redact_option_must_be_a_function():
    with pytest.raises(OptionError, match=r"^redact: expected a function, got 'plate'$"):
        job(name="tests.redaction.wrong", redact="plate")(print)


def test_edit_form_shows_no_more_than_redact_function():
    made = record("tests.redaction.refund", REFUND)

    drafts = editing.editable(made).drafts

    assert "TXL" not in drafts["kwargs"].text
    assert "2051" not in drafts["kwargs"].text
    assert "42" in drafts["args"].text
    # What it shows has other parts than the value, so that nothing of that is told apart.
    assert [value for _, value in drafts["kwargs"].hidden.values()] == [REFUND["kwargs"]]


FORMS = [None, "masked", {}, {"args": [], "kwargs": {}}, {"args": [43], "kwargs": {"plate": None, "more": 1}}]


@pytest.mark.parametrize("answer", FORMS)
def test_edit_form_hides_arguments_for_any_result_of_redact_function(answer):
    @job(name="tests.redaction.any", redact=lambda value, part: answer)
    def anything():
        pass

    drafts = editing.editable(record("tests.redaction.any", REFUND)).drafts

    texts = "".join(draft.text for draft in drafts.values())
    assert "TXL" not in texts
    assert "42" not in texts


def test_edit_form_hides_all_arguments_if_redact_function_fails(caplog):
    drafts = editing.editable(record("tests.redaction.refund", {"args": [42], "kwargs": {"x": 1}})).drafts

    assert [draft.text for draft in drafts.values()] == ['"•••1"', '"•••1"']
