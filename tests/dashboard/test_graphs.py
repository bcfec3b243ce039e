"""The layout of a workflow: no boxes overlap, every line goes forward, and no job is missing."""

from hypothesis import given, settings
from hypothesis import strategies as st

from djqueue.core.flow import FlowEdge, FlowGraph, FlowNode
from djqueue.core.states import State
from djqueue.dashboard import flowcharts, timelines


def graph_of(count, pairs, states=None):
    nodes = [
        FlowNode("q", str(number), "job", states[number] if states else State.WAITING)
        for number in range(count)
    ]
    return FlowGraph(0, nodes, [FlowEdge(before, after, False) for before, after in sorted(pairs)])


@st.composite
def some_graphs(draw, most=25):
    count = draw(st.integers(1, most))
    after = {after: draw(st.sets(st.integers(0, after - 1), max_size=4)) for after in range(1, count)}
    names = draw(st.permutations(range(count)))  # a job may be older than those that it waits for
    states = draw(st.lists(st.sampled_from([*State, None]), min_size=count, max_size=count))
    pairs = [(names[before], names[one]) for one, some in after.items() for before in some]
    return graph_of(count, pairs, states)


def overlap(one, other):
    return abs(one.x - other.x) < flowcharts.WIDTH and abs(one.y - other.y) < flowcharts.HEIGHT


def check(drawing, graph):
    boxes = drawing.boxes
    assert sorted(place for box in boxes for place in box.nodes) == list(range(len(graph.nodes)))
    assert not any(overlap(one, other) for at, one in enumerate(boxes) for other in boxes[:at])
    for box in boxes:
        assert box.x >= 0
        assert box.y >= 0
        assert box.x + flowcharts.WIDTH <= drawing.width
        assert box.y + flowcharts.HEIGHT <= drawing.height
        assert {graph.nodes[place].state for place in box.nodes} == {box.state}
    for line in drawing.lines:
        before, after = boxes[line.before], boxes[line.after]
        assert before.layer < after.layer
        across = [x for x, _ in line.points]
        assert across == sorted(across)
        middle = flowcharts.HEIGHT // 2
        assert line.points[0] == (before.x + flowcharts.WIDTH, before.y + middle)
        assert line.points[-1] == (after.x, after.y + middle)
        assert all(0 <= y <= drawing.height for _, y in line.points)


@given(some_graphs())
def test_every_job_has_its_own_box_and_every_line_goes_forward(graph):
    drawing = flowcharts.draw(graph)
    check(drawing, graph)
    assert [box.nodes for box in drawing.boxes] == [(place,) for place in range(len(graph.nodes))]
    assert {(line.before, line.after) for line in drawing.lines} == {
        (edge.before, edge.after) for edge in graph.edges
    }
    assert not drawing.collapsed
    assert drawing == flowcharts.draw(graph)


@given(some_graphs())
def test_lines_avoid_boxes_of_layers_that_they_cross(graph):
    drawing = flowcharts.draw(graph)
    for line in drawing.lines:
        for (left, y), (right, end) in zip(line.points, line.points[1:], strict=False):
            if right - left == flowcharts.WIDTH:
                assert y == end
                assert not any(
                    box.x == left and box.y < y < box.y + flowcharts.HEIGHT for box in drawing.boxes
                )


@given(some_graphs())
def test_jobs_of_large_graph_are_collapsed_by_layer_and_state(graph):
    most = 9
    drawing = flowcharts.draw(graph, most)
    check(drawing, graph)
    assert len(drawing.boxes) <= max(most, len(State) + 1)
    assert drawing.collapsed is (len(graph.nodes) > most)


@given(some_graphs())
@settings(max_examples=50)
def test_job_is_one_layer_after_its_last_dependency(graph):
    pairs = [(edge.before, edge.after) for edge in graph.edges]
    layers = flowcharts.layers_of(len(graph.nodes), pairs)
    for node, layer in enumerate(layers):
        assert layer == max((layers[before] + 1 for before, after in pairs if after == node), default=0)


def test_chord_has_two_layers_with_its_callback_centered():
    drawing = flowcharts.draw(graph_of(4, [(0, 3), (1, 3), (2, 3)]))
    assert [box.layer for box in drawing.boxes] == [0, 0, 0, 1]
    assert drawing.boxes[3].y == drawing.boxes[1].y


def test_chains_side_by_side_do_not_cross():
    pairs = [(0, 5), (1, 4), (2, 3), (3, 8), (4, 7), (5, 6)]
    drawing = flowcharts.draw(graph_of(9, pairs))
    for line in drawing.lines:
        assert len({y for _, y in line.points}) == 1


def test_chain_of_a_thousand_jobs_is_drawn_as_few_boxes():
    pairs = [(number, number + 1) for number in range(999)]
    states = [State.COMPLETED] * 400 + [State.FAILED] + [State.BLOCKED] * 599
    graph = graph_of(1_000, pairs, states)
    drawing = flowcharts.draw(graph)
    check(drawing, graph)
    assert len(drawing.boxes) <= 40
    assert any(len(box.nodes) == 1 and box.state is State.FAILED for box in drawing.boxes)


def test_only_the_shortest_of_many_lines_are_drawn():
    pairs = [(before, after) for after in range(60) for before in range(after)]
    graph = graph_of(60, pairs)
    drawing = flowcharts.draw(graph)
    check(drawing, graph)
    assert (len(drawing.lines), drawing.left_out) == (flowcharts.MAX_LINES, 1_770 - flowcharts.MAX_LINES)
    assert {(number, number + 1) for number in range(59)} <= {
        (line.before, line.after) for line in drawing.lines
    }


def fan_out(count, states=None):
    """Return a graph in which each of `count` pages is fetched, then cleaned, before all are merged."""
    names = ["start", *["fetch"] * count, *["clean"] * count, "merge"]
    pairs = [(0, 1 + at) for at in range(count)]
    pairs += [(1 + at, 1 + count + at) for at in range(count)]
    pairs += [(1 + count + at, 1 + 2 * count) for at in range(count)]
    graph = graph_of(len(names), pairs, states)
    nodes = [node._replace(name=name) for node, name in zip(graph.nodes, names, strict=True)]
    return graph._replace(nodes=nodes)


def test_equal_jobs_share_a_box_that_counts_their_states():
    states = [State.COMPLETED] * 41 + [State.COMPLETED] * 39 + [State.FAILED, State.BLOCKED]
    graph = fan_out(40, states)
    drawing = flowcharts.draw(graph, fold=True)
    texts = [
        (flowcharts.label_of(box, graph), flowcharts.states_of(box, graph)) for box in drawing.in_order()
    ]
    assert texts == [
        ("start", "completed"),
        ("fetch × 40", "40 completed"),
        ("clean × 40", "39 completed, 1 failed"),
        ("merge", "blocked"),
    ]
    assert [box.state for box in drawing.in_order()][2] is State.FAILED
    assert drawing.folded
    assert len(drawing.lines) == 3


def test_few_jobs_and_jobs_with_other_neighbors_keep_their_boxes():
    assert not flowcharts.draw(fan_out(flowcharts.MIN_FOLDED - 1), fold=True).folded
    graph = graph_of(13, [(at, 12) for at in range(6)])  # six jobs before the last one, six alone
    sizes = sorted(len(box.nodes) for box in flowcharts.draw(graph, fold=True).boxes)
    assert sizes == [1, 6, 6]


@given(some_graphs())
def test_folded_graph_keeps_every_job_and_the_direction_of_its_lines(graph):
    drawing = flowcharts.draw(graph, fold=True)
    assert sorted(place for box in drawing.boxes for place in box.nodes) == list(range(len(graph.nodes)))
    assert all(drawing.boxes[line.before].layer < drawing.boxes[line.after].layer for line in drawing.lines)
    pairs = [(edge.before, edge.after) for edge in graph.edges]
    box_of = {place: index for index, box in enumerate(drawing.boxes) for place in box.nodes}
    assert {(box_of[before], box_of[after]) for before, after in pairs} == {
        (line.before, line.after) for line in drawing.lines
    }


def test_root_cause_is_the_first_job_that_failed_by_itself():
    graph = graph_of(4, [(0, 1), (1, 2), (0, 3)], [State.COMPLETED, State.FAILED, State.FAILED, State.FAILED])
    reasons = ["", "timeout", flowcharts.CAUSED, "stalled"]
    nodes = [
        node._replace(reason=reason, finished_at=100 - at)
        for at, (node, reason) in enumerate(zip(graph.nodes, reasons, strict=True))
    ]
    assert [node.id for node in flowcharts.causes(graph._replace(nodes=nodes))] == ["3", "1"]
    alone = [node._replace(reason="timeout") for node in nodes]
    assert flowcharts.causes(graph._replace(nodes=alone)) == []


def test_timeline_has_waits_runs_and_the_critical_path():
    #      created, started, finished; the second of two jobs in the middle ends last
    times = [(0, 10, 20), (0, 25, 40), (0, 20, 70), (0, 90, 100)]
    graph = graph_of(4, [(0, 1), (0, 2), (1, 3), (2, 3)], [State.COMPLETED] * 4)
    nodes = [
        node._replace(created_at=created, started_at=started, finished_at=finished)
        for node, (created, started, finished) in zip(graph.nodes, times, strict=True)
    ]
    graph = graph._replace(nodes=[node._replace(created_at=1, name=f"job {node.id}") for node in nodes])
    found = timelines.of_workflow(graph, flowcharts.draw(graph), 1_000, lambda node: node.id)
    assert [node.id for node in found.critical] == ["0", "2", "3"]
    assert (found.length, found.waiting, found.running) == (99, 9 + 0 + 20, 10 + 50 + 10)
    rows = {row.label: row for row in found.timeline.rows}
    assert {label: row.is_critical for label, row in rows.items()} == {
        "job 0": True,
        "job 1": False,
        "job 2": True,
        "job 3": True,
    }
    wait, run = rows["job 3"].spans
    assert (wait.kind, wait.left, wait.right) == ("wait", "69.70%", "89.90%")
    assert (run.kind, run.left, run.right) == ("completed", "89.90%", "100.00%")
    assert [span.kind for span in rows["job 2"].spans] == ["completed"]


def test_workflow_that_has_not_started_has_a_timeline_without_critical_path():
    graph = graph_of(2, [(0, 1)], [State.WAITING, State.BLOCKED])
    graph = graph._replace(nodes=[node._replace(created_at=100) for node in graph.nodes])
    found = timelines.of_workflow(graph, flowcharts.draw(graph), 400, lambda node: node.id)
    assert found.critical == []
    assert [[span.kind for span in row.spans] for row in found.timeline.rows] == [["wait"], []]
    assert timelines.of_workflow(graph_of(1, []), flowcharts.draw(graph_of(1, [])), 400, str) is None
