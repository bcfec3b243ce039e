"""The diagram of a job's life agrees with its events."""

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djqueue.core.states import State
from djqueue.dashboard import charts

T = 1_780_000_000_000


def kinds(found):
    return [stage.kind for stage in found.stages]


def test_waiting_and_running_times_of_all_attempts_are_added():
    found = charts.life(
        State.COMPLETED,
        [
            ("enqueued", T),
            ("started", T + 3_000),
            ("retried", T + 4_000),
            ("started", T + 10_000),
            ("completed", T + 12_000),
        ],
    )
    assert kinds(found) == ["past", "past", "past", "good"]
    _, waiting, active, end = found.stages
    assert waiting.lines == ("9 s",)
    assert active.lines == ("2 attempts", "3 s")
    assert (end.label, end.lines[1]) == ("completed", "after 12 s")
    assert found.returns == 1


@pytest.mark.parametrize(
    ("state", "events", "shown"),
    [
        (State.WAITING, ["enqueued"], ["past", "now", "none", "none"]),
        (State.DELAYED, ["enqueued", "started", "retried"], ["past", "now", "past", "none"]),
        (State.BLOCKED, ["enqueued"], ["past", "now", "none", "none"]),
        (State.ACTIVE, ["enqueued", "started"], ["past", "past", "now", "none"]),
        (State.FAILED, ["enqueued", "started", "failed"], ["past", "past", "past", "bad"]),
        (State.FAILED, ["enqueued", "failed"], ["past", "past", "none", "bad"]),
        (State.CANCELLED, ["enqueued", "cancelled"], ["past", "past", "none", "past"]),
    ],
)
def test_current_and_past_states_are_drawn_differently(state, events, shown):
    found = charts.life(state, [(word, T + 5 * index) for index, word in enumerate(events)], T + 100)
    assert kinds(found) == shown
    assert state.value in [stage.label for stage in found.stages]


def test_job_that_waits_again_has_one_line_back():
    events = [("enqueued", T), ("started", T + 1), ("stalled", T + 2)]
    assert charts.life(State.WAITING, events).returns == 1
    assert charts.life(State.WAITING, events[:1]).returns == 0


@given(
    st.sampled_from(sorted(State)),
    st.lists(st.sampled_from(["started", "retried", "stalled", "failed", "<x>"]), max_size=6),
)
def test_diagram_stays_in_its_frame_and_uses_no_inline_styles(state, words):
    events = [("enqueued", T), *((word, T + 1_000 * index) for index, word in enumerate(words, 1))]
    found = charts.life(state, events, T)
    root = ElementTree.fromstring(str(charts.life_svg(found)))
    assert root.attrib["aria-label"] == charts.describe_life(found)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iter("rect"):
        assert 0 <= float(box.attrib["x"]) <= width - float(box.attrib["width"])
        assert 0 <= float(box.attrib["y"]) <= height - float(box.attrib["height"])
    assert not any("style" in part.attrib for part in root.iter())
