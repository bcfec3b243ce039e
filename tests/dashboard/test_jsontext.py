"""Values as editable JSON: unchanged text restores the same value, or editing is not offered."""

from datetime import UTC, date, datetime
from decimal import Decimal
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given

from djqueue.dashboard import jsontext
from djqueue.dashboard.jsontext import MalformedError, NotEditableError
from djqueue.dashboard.redaction import Hidden, redact
from tests.codecs.values import values

SECRET = {"to": "ann", "password": "hunter2", "cards": [{"card": 1}, {"card": 2}]}


@given(values)
def test_unchanged_text_restores_the_value_or_editing_is_not_offered(value):
    try:
        draft = jsontext.write(value, value)
    except NotEditableError:
        return
    assert repr(jsontext.read(draft.text, draft.hidden)) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        2**64 - 1,
        b"\x00\xff",
        date(2026, 6, 1),
        datetime(2026, 6, 1, 12, tzinfo=UTC),
        Decimal("1.10"),
        (1, (2, b"x")),
        {"a": [1.5, -0.0, None, True, "\n\x00\u2028"]},
    ],
)
def test_types_of_the_codec_that_json_lacks_are_preserved(value):
    draft = jsontext.write(value, value)
    assert repr(jsontext.read(draft.text, draft.hidden)) == repr(value)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"a": [{1: 2}]}, r"a\[0\]: JSON object keys must be strings"),
        ([float("nan")], r"\[0\]: JSON can't represent nan"),
        (datetime(2026, 6, 1, tzinfo=ZoneInfo("Asia/Kathmandu")), "a round trip through JSON"),
        ({"a": {"$date": 5}}, "a: the value looks like a placeholder"),
        (["•••7"], r"\[0\]: the value looks like a placeholder"),
        ([object()], r"\[0\]: JSON can't represent object"),
        (["x" * 100_001], "more than 100,000 characters"),
    ],
)
def test_value_that_would_lose_data_is_reported_with_its_path(value, why):
    with pytest.raises(NotEditableError, match=why):
        jsontext.write(value, value)


def test_secret_is_not_in_the_text_and_stays_at_its_path():
    draft = jsontext.write(SECRET, redact(SECRET, ("password", "card")))
    assert "hunter2" not in draft.text
    assert repr(jsontext.read(draft.text, draft.hidden)) == repr(SECRET)
    changed = jsontext.read(draft.text.replace("ann", "bob").replace('"•••1"', '"new"'), draft.hidden)
    assert (changed["to"], changed["password"], changed["cards"]) == ("bob", "new", SECRET["cards"])


@pytest.mark.parametrize(
    "text",
    [
        '{"to": "•••1", "password": "x"}',  # shown under another name
        '{"note": {"password": "•••1"}}',
        '["•••1"]',
        '"•••1"',
        '{"password": "•••9"}',
        '{"password": "•••2"}',
    ],
)
def test_secret_cannot_be_moved_to_a_visible_path(text):
    shown = redact(SECRET, ("password",))
    draft = jsontext.write(SECRET, shown)
    with pytest.raises(MalformedError, match="only in its original place"):
        jsontext.read(text, draft.hidden)


@pytest.mark.parametrize(
    "shown",
    [
        {"card": "…1111"},
        {"card": None},
        {"card": ["4111", "1111"]},
        {},
        {"card": "41111111", "more": 1},
        "nothing",
        Hidden(),
    ],
)
def test_value_that_is_shown_altered_counts_as_secret(shown):
    draft = jsontext.write({"card": "41111111"}, shown)
    assert "4111" not in draft.text
    assert jsontext.read(draft.text, draft.hidden) == {"card": "41111111"}


def test_items_of_reordered_list_do_not_swap_secrets():
    hidden = jsontext.write([{"card": 1}, {"card": 2}], [{"card": Hidden()}, {"card": Hidden()}]).hidden
    with pytest.raises(MalformedError, match="•••2 stands for"):
        jsontext.read('[{"card": "•••2"}]', hidden)
    assert jsontext.read('[{"card": "•••1"}]', hidden) == [{"card": 1}]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Invalid JSON at line 1, column 2"),
        ("", "Invalid JSON"),
        ('{"a": 1, "a": 2}', 'Duplicate key: "a"'),
        ("NaN", "can't represent NaN"),
        ("[" * 50_000, "nested too deeply"),
        ('{"a":' * 500 + "1" + "}" * 500, "nested too deeply"),
        ("1" * 5_000, "digits"),
        ('{"$bytes": "?"}', r"\$bytes"),
        ('{"$bytes": 5}', r"\$bytes"),
        ('{"$uuid": 5}', r"\$uuid"),
        ('{"$date": "tomorrow"}', r"\$date"),
        ('{"$decimal": "x"}', r"\$decimal"),
        ('{"$tuple": "abc"}', r"\$tuple"),
        ('{"$timedelta": [1e400, 0, 0]}', r"\$timedelta"),
        (" " * 100_001, "at most 100,000"),
    ],
)
def test_invalid_value_is_rejected_with_its_reason(text, why):
    with pytest.raises(MalformedError, match=why):
        jsontext.read(text, {})
