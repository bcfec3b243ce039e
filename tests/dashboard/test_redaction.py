"""Secrets are hidden by the names that they have, wherever they lie."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djqueue import OptionError, job
from djqueue.codecs import MSGPACK, encode
from djqueue.core.options import JobOptions
from djqueue.dashboard import editing, redaction
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


def record(name, value):
    made = make_job(name=name)
    made.payload = encode(value, MSGPACK)
    made.options = JobOptions()
    return made.record()


@given(values)
def test_a_secret_is_hidden_at_any_depth(value):
    shown = redaction.redact([{"deep": ({"Password_1": value, "api_key": value},)}], WORDS)
    assert [repr(one) for one in shown[0]["deep"][0].values()] == ["•••", "•••"]
    assert redaction.has_secrets(shown)


@given(values)
def test_what_has_no_secret_name_is_shown_as_it_is(value):
    named = {"monkeys": value, "keys": [value]}
    if not redaction.has_secrets(redaction.redact(value, WORDS)):
        assert redaction.redact(named, WORDS) == named


def test_arguments_by_position_have_the_names_of_their_parameters():
    found = redaction.payload(
        record("tests.redaction.pay", {"args": [42, "tok", "more"], "kwargs": {"email": "a@b.c", "n": 1}}),
        revealed=False,
    )
    assert repr(found) == "{'args': [42, •••, 'more'], 'kwargs': {'email': •••, 'n': 1}}"


def test_arguments_by_position_of_a_function_that_nobody_knows_here_are_hidden():
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


def test_a_job_hides_what_its_own_function_hides_and_what_the_settings_say():
    made = record("tests.redaction.refund", REFUND)

    shown = redaction.payload(made, revealed=False)

    assert repr(shown) == "{'args': [42], 'kwargs': {'plate': '2051', 'password': •••}}"
    assert redaction.payload(made, revealed=True) == REFUND


def test_what_was_masked_can_be_revealed_though_nothing_was_left_out():
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


def test_if_the_function_fails_nothing_is_shown_and_the_log_says_why_without_the_value(caplog):
    made = record("tests.redaction.refund", 1)._replace(result=encode("hunter2", MSGPACK))

    with caplog.at_level(logging.ERROR, "djqueue.dashboard"):
        shown = redaction.result(made, revealed=False)

    assert repr(shown) == "•••"
    assert redaction.hides(made, made.result, shown)
    assert "tests.redaction.refund failed at" in caplog.text
    assert "LookupError" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("answer", [{"args": 5, "kwargs": {}}, {"args": None, "kwargs": None}])
def test_an_answer_that_has_not_the_form_of_a_call_shows_nothing(answer):
    @job(name="tests.redaction.odd", redact=lambda value, part: answer)
    def odd():
        pass

    assert repr(redaction.payload(record("tests.redaction.odd", REFUND), revealed=False)) == "•••"


def test_the_same_job_with_other_options_has_the_same_function():
    assert refund.using(priority=3).redact_function is mask


def test_what_is_no_function_is_refused():
    with pytest.raises(OptionError, match=r"^redact: expected a function, got 'plate'$"):
        job(name="tests.redaction.wrong", redact="plate")(print)


def test_who_edits_a_job_sees_no_more_than_its_own_function_shows():
    made = record("tests.redaction.refund", REFUND)

    drafts = editing.editable(made).drafts

    assert "TXL" not in drafts["kwargs"].text
    assert "2051" not in drafts["kwargs"].text
    assert "42" in drafts["args"].text
    # What it shows has other parts than the value, so that nothing of that is told apart.
    assert [value for _, value in drafts["kwargs"].hidden.values()] == [REFUND["kwargs"]]


FORMS = [None, "masked", {}, {"args": [], "kwargs": {}}, {"args": [43], "kwargs": {"plate": None, "more": 1}}]


@pytest.mark.parametrize("answer", FORMS)
def test_whatever_the_function_answers_nothing_else_is_edited(answer):
    @job(name="tests.redaction.any", redact=lambda value, part: answer)
    def anything():
        pass

    drafts = editing.editable(record("tests.redaction.any", REFUND)).drafts

    texts = "".join(draft.text for draft in drafts.values())
    assert "TXL" not in texts
    assert "42" not in texts


def test_if_the_function_fails_all_is_hidden_from_who_edits(caplog):
    drafts = editing.editable(record("tests.redaction.refund", {"args": [42], "kwargs": {"x": 1}})).drafts

    assert [draft.text for draft in drafts.values()] == ['"•••1"', '"•••1"']
