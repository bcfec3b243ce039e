"""The layout of a workflow: no boxes overlap, every line goes forward, and no job is missing."""

from hypothesis import given, settings
from hypothesis import strategies as st

from djqueue.core.flow import FlowEdge, FlowGraph, FlowNode
from djqueue.core.states import State
from djqueue.dashboard import flowcharts


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
