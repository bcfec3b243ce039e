"""`flow`, `chain`, `group`, `chord`: the enqueued jobs, and flows that are rejected."""

import pytest

from djqueue import Queue, State, chain, chord, flow, group, job
from djqueue.client import Flow, Node, flows
from djqueue.errors import OptionError, SerializationError
from djqueue.storage.memory import MemoryStorage
from djqueue.testing.factories import claim, completing, finish


@pytest.fixture
def fetch():
    @job(name="fetch", queue="pages")
    def fetch(page, *, deep=False):
        return page

    return fetch


@pytest.fixture
def merge():
    @job(name="merge", queue="books")
    def merge(*words, after=None):
        return words

    return merge


def rounds(storage, *names):
    """The arguments of the jobs in each claim, until there are none; all of them complete."""
    from djqueue.codecs import MSGPACK, decode

    found = []
    while claimed := claim(storage, 2_000, names=["fetch", "merge", "pages", "books", *names]):
        payloads = [decode(one.payload, MSGPACK) for one in claimed]
        found.append([one["args"][0] if isinstance(one, dict) else one for one in payloads])
        finish(storage, *map(completing, claimed))
    return [sorted(some) for some in found]


def test_flow_runs_jobs_after_their_dependencies(fetch, merge, storage, do):
    first, second = fetch.node(1), fetch.node(2, deep=True)
    last = merge.using(priority=3).node("all", after="is an argument").after(first, second)

    result = do(flow(last), "enqueue")

    assert [answer.status for answer in result] == ["queued"] * 3
    info = Queue("books").get_job(result[last].id)
    assert info.options.depends_on == (("pages", first.id), ("pages", second.id))
    assert info.options.priority == 3
    assert info.payload == {"args": ["all"], "kwargs": {"after": "is an argument"}}
    assert rounds(storage) == [[1, 2], ["all"]]


def test_flow_result_has_all_ids_in_enqueue_order(fetch, merge):
    last, first = merge.node("all"), fetch.node(1)

    result = flow(last.after(first)).enqueue()

    assert result.ids == [first.id, last.id]
    assert [answer.queue for answer in result] == ["pages", "books"]
    assert len(result) == 2
    assert (result[first].id, result[last].id) == (first.id, last.id)


def test_flow_nodes_can_have_names(fetch, merge, storage):
    whole = flow(
        load=merge.node("load").after("clean"),
        clean=fetch.node("clean").after("read"),
        read=fetch.node("read"),
    )

    result = whole.enqueue()

    assert result["read"].queue == "pages"
    assert rounds(storage) == [["read"], ["clean"], ["load"]]


def test_queue_payloads_can_be_nodes(fetch, storage, do):
    pages = Queue("pages", priority=2)
    first = pages.node("first", id="one", tags=["t"])
    result = do(flow(fetch.node("second").after(first)), "enqueue")

    assert result[first].id == "one"
    assert pages.get_job("one").options.tags == ("t",)
    assert rounds(storage) == [["first"], ["second"]]


def test_flow_can_depend_on_existing_jobs(fetch, merge, storage):
    there, other = fetch.enqueue("there"), fetch.enqueue("other")
    depends = merge.using(depends_on=[other])

    result = flow(depends.node("last").after(there, ("pages", other.id), fetch.node("new"))).enqueue()

    info = Queue("books").get_job(result.ids[-1])
    assert info.options.depends_on[:2] == (("pages", other.id), ("pages", there.id))
    assert rounds(storage) == [["new", "other", "there"], ["last"]]


def test_chain_runs_one_job_after_another(fetch, storage, do):
    do(chain(*(fetch.node(number) for number in range(4))), "enqueue")

    assert rounds(storage) == [[0], [1], [2], [3]]


def test_group_runs_all_jobs_at_once(fetch, storage):
    group(*(fetch.node(number) for number in range(4))).enqueue()

    assert rounds(storage) == [[0, 1, 2, 3]]


def test_chord_runs_one_job_after_all_others(fetch, merge, storage):
    chord([fetch.node(number) for number in range(3)], then=merge.node("all")).enqueue()

    assert rounds(storage) == [[0, 1, 2], ["all"]]


def test_flows_can_be_nested(fetch, merge, storage):
    middle = group(fetch.node("b"), chain(fetch.node("c"), fetch.node("d")))
    whole = chain(fetch.node("a"), middle, chord([fetch.node("e")], then=merge.node("f")))

    flow(whole, fetch.node("alone")).enqueue()

    assert rounds(storage) == [["a", "alone"], ["b", "c"], ["d"], ["e"], ["f"]]


def test_node_can_follow_a_flow(fetch, merge, storage):
    flow(merge.node("last").after(chain(fetch.node("a"), fetch.node("b")))).enqueue()

    assert rounds(storage) == [["a"], ["b"], ["last"]]


def test_flow_of_a_thousand_jobs_is_enqueued_in_two_batches(fetch, merge, storage, monkeypatch):
    calls = []
    enqueue = storage.enqueue
    monkeypatch.setattr(storage, "enqueue", lambda batches: calls.append(list(batches)) or enqueue(batches))

    chord([fetch.node(number) for number in range(1_000)], then=merge.node("all")).enqueue()

    assert [[len(batch.payloads) for batch in batches] for batches in calls] == [[1_000, 1]]
    assert [len(some) for some in rounds(storage)] == [1_000, 1]


def test_enqueueing_the_same_flow_again_returns_the_same_jobs(fetch, merge, storage, do):
    whole = chain(fetch.node(1), merge.node("all"))
    ids = do(whole, "enqueue").ids

    again = do(whole, "enqueue")
    assert again.ids == ids
    assert [answer.status for answer in again] == ["duplicate"] * 2

    assert rounds(storage) == [[1], ["all"]]
    done = do(whole, "enqueue")
    assert [(answer.status, answer.result) for answer in done] == [("completed", "result")] * 2


def test_partly_stored_flow_is_completed(fetch, merge, storage):
    first, last = fetch.using(id="import:1").node(1), merge.using(id="import:2").node("all")
    flow(first).enqueue()

    answers = chain(first, last).enqueue()

    assert [answer.status for answer in answers] == ["duplicate", "queued"]
    assert rounds(storage) == [[1], ["all"]]


# What is refused, with nothing stored.


@pytest.fixture
def nothing_is_stored(storage):
    yield
    assert storage.queues.names() == []


@pytest.mark.usefixtures("nothing_is_stored")
class TestBadFlows:
    def test_cyclic_flow_is_rejected(self, fetch, merge):
        first, second, third = fetch.node(1), fetch.using(id="two").node(2), merge.node(3)
        first.after(third.after(second.after(first)))

        circle = f"merge {third.id} -> fetch two -> fetch {first.id} -> merge {third.id}"
        with pytest.raises(OptionError, match=f"depend on each other in a cycle: {circle}"):
            flow(third, fetch.node("free")).enqueue()

    def test_cyclic_flow_of_named_nodes_is_rejected(self, fetch):
        whole = flow(a=fetch.node(1).after("b"), b=fetch.node(2).after("a"))

        with pytest.raises(OptionError, match="a -> b -> a"):
            whole.enqueue()

    def test_node_that_depends_on_itself_is_rejected(self, fetch):
        node = fetch.using(id="me").node(1)

        with pytest.raises(OptionError, match="fetch me -> fetch me"):
            flow(node.after(flow(node))).enqueue()

    def test_unknown_node_name_is_rejected(self, fetch):
        with pytest.raises(OptionError, match=r"'exract'.*'extract'"):
            flow(extract=fetch.node(1), load=fetch.node(2).after("exract")).enqueue()

    def test_unknown_dependency_is_rejected(self, fetch):
        with pytest.raises(OptionError, match="'pages' has no job 'nobody'"):
            chain(fetch.node(1), fetch.node(2).after(("pages", "nobody"))).enqueue()

    def test_two_nodes_with_the_same_id_are_rejected(self, fetch):
        with pytest.raises(OptionError, match="two nodes have the id 'x' in queue 'pages'"):
            group(fetch.using(id="x").node(1), fetch.using(id="x").node(2)).enqueue()

    def test_two_nodes_with_the_same_name_are_rejected(self, fetch):
        with pytest.raises(OptionError, match="two nodes are named 'a'"):
            flow(flow(a=fetch.node(1)), a=fetch.node(2)).enqueue()

    def test_node_with_two_names_is_rejected(self, fetch):
        node = fetch.node(1)
        with pytest.raises(OptionError, match="'a', and cannot also be named 'b'"):
            flow(a=node, b=node)

    def test_node_with_unserializable_argument_is_rejected(self, fetch):
        with pytest.raises(SerializationError, match=r"payload\.args"):
            chain(fetch.node(1), fetch.node({1, 2})).enqueue()

    def test_empty_flow_is_rejected(self):
        with pytest.raises(OptionError, match="at least one job"):
            flow().enqueue()

    @pytest.mark.parametrize("part", ["a name", 1, None])
    def test_part_that_is_not_a_node_is_rejected(self, fetch, part):
        with pytest.raises(OptionError, match="neither a node nor a flow"):
            flow(part)
        with pytest.raises(OptionError, match="expected a node"):
            flow(named=part)

    @pytest.mark.parametrize("other", [1, None, ("a", "b", "c"), ["a"]])
    def test_invalid_predecessor_is_rejected(self, fetch, other):
        with pytest.raises(OptionError, match="expected a node, a flow, a name or a job"):
            fetch.node(1).after(other)

    def test_flow_across_two_storages_is_rejected(self, fetch):
        elsewhere = Queue("pages", storage=MemoryStorage())
        with pytest.raises(OptionError, match="different storages"):
            chain(fetch.node(1), elsewhere.node(2)).enqueue()

    def test_node_with_invalid_options_is_rejected(self, fetch):
        with pytest.raises(OptionError, match="priority"):
            Queue("pages").node(1, priority="high")
        with pytest.raises(OptionError, match="id"):
            Queue("pages").node(1, id="")


def test_jobs_of_a_flow_store_a_limited_number_of_dependents(fetch, merge, storage, monkeypatch):
    monkeypatch.setattr(flows, "FOLLOWERS", 2)
    first, alone = fetch.node(1), fetch.node(2)
    books = [merge.node(number).after(first) for number in range(3)]
    flow(alone, *books).enqueue()

    known = {job.id: job.options.dependents for job in storage.reads.page("pages", None, 10)}
    keys = [("books", book.id) for book in books]
    assert known == {first.id: tuple(keys[:2]), alone.id: ()}
    assert not any(job.options.dependents for job in storage.reads.page("books", None, 10))


def test_dependents_are_not_stored_when_that_requires_many_batches(fetch, merge, storage, monkeypatch):
    monkeypatch.setattr(flows, "MORE_BATCHES", 1)
    heads = [fetch.node(number) for number in range(3)]
    last = merge.node(9)
    middle = [merge.node(number).after(head) for number, head in enumerate(heads)]
    chord(middle, then=last).enqueue()

    known = {
        job.id: job.options.dependents
        for queue in ("pages", "books")
        for job in storage.reads.page(queue, None, 9)
    }
    assert {known[node.id] for node in heads} == {()}
    assert {known[node.id] for node in middle} == {(("books", last.id),)}


def test_completed_flow_is_found_from_its_first_job(fetch, merge, storage):
    first = fetch.node(1)
    done = chord([first, fetch.node(2)], then=merge.node(3)).enqueue()
    rounds(storage)

    found = storage.reads.flow("pages", first.id)

    assert {node.id for node in found.nodes} == set(done.ids)
    assert {node.state for node in found.nodes} == {State.COMPLETED}


def test_nodes_and_flows_have_readable_reprs(fetch):
    node = fetch.using(id="x").node(1)

    assert isinstance(node, Node)
    assert repr(node) == "<node fetch x>"
    assert isinstance(flow(a=node), Flow)
    assert repr(flow(node)) == "<flow of 1 jobs>"
    assert repr(node) == "<node a>"
    assert repr(flow(node).enqueue()) == "<result of a flow of 1 jobs>"
    assert Queue("pages").get_states(["x"]) == {"x": State.WAITING}
