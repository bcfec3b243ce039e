"""The Grafana dashboard that is shipped: everything that it queries exists."""

import json
import re
import subprocess
import sys

import pytest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from djqueue.contrib.metrics.collector import DEFINITIONS

SUFFIXES = {CounterMetricFamily: ("_total",), HistogramMetricFamily: ("_bucket", "_count", "_sum")}


def known():
    """Return the labels of everything that a scrape has, by name."""
    found = {}
    for name, definition in DEFINITIONS.items():
        for suffix in SUFFIXES.get(definition.kind, ("",)):
            found[name + suffix] = {*definition.labels, *(["le"] if suffix == "_bucket" else [])}
    return found


@pytest.fixture(scope="module")
def dashboard():
    printed = subprocess.run(
        [sys.executable, "-m", "djqueue.contrib.metrics"], capture_output=True, text=True, check=True
    )
    return json.loads(printed.stdout)


def expressions(dashboard):
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    yield from (target["expr"] for panel in panels for target in panel["targets"])
    yield from (
        one["query"]["query"] for one in dashboard["templating"]["list"] if isinstance(one["query"], dict)
    )


def test_every_query_uses_existing_metrics_and_labels(dashboard):
    metrics = known()
    for expression in expressions(dashboard):
        named = re.findall(r"\bdjqueue_\w+", expression)
        assert named, expression
        assert set(named) <= metrics.keys(), expression
        for name, matchers in re.findall(r"(djqueue_\w+)\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)(?:=|!|=~|!~)", matchers)) <= metrics[name], expression
        for labels in re.findall(r"by \(([^)]*)\)", expression):
            wanted = set(labels.split(", "))
            assert all(wanted <= metrics[name] for name in named if name != "djqueue_workers_wanted"), (
                expression
            )


def test_every_metric_of_jobs_and_workers_is_shown(dashboard):
    shown = set(
        re.findall(r"\bdjqueue_\w+?(?=\b|_total|_bucket|_count|_sum)", " ".join(expressions(dashboard)))
    )
    hidden = {"djqueue_queue_paused", "djqueue_build_info"}

    assert {name for name in DEFINITIONS if not any(one.startswith(name) for one in shown)} == hidden


def test_panels_are_complete_and_do_not_overlap(dashboard):
    taken = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["title"]
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
