"""Sparklines use attributes only, and stay in their frame."""

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from djqueue.dashboard import charts


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=100))
def test_sparkline_stays_in_its_frame(values):
    found = charts.points(values, 90, 24)
    assert len(found) == len(values)
    assert all(0 <= x <= 90 and 0 <= y <= 24 for x, y in found)
    assert [x for x, _ in found] == sorted(x for x, _ in found)


def test_sparkline_has_a_label_and_no_inline_style():
    svg = str(charts.sparkline([1, 2, 3], '"<jobs>'))
    root = ElementTree.fromstring(svg)
    assert root.attrib["aria-label"] == '"<jobs>'
    assert "style" not in svg
    assert charts.sparkline([], "jobs") == ""
