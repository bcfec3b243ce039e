"""What a comparison with other job queues writes."""

from xml.etree import ElementTree

import pytest

from tools.benchmarks import comparing, peer_runs
from tools.benchmarks.charts import Bar, Panel, chart
from tools.benchmarks.comparing import DOCS, SECTIONS, System, section, table, write_docs
from tools.benchmarks.installing import Environment, NotInstallableError, node_environment
from tools.benchmarks.marks import Drain
from tools.benchmarks.peer_runs import PROGRAMS, PeerError, complete, installed
from tools.benchmarks.peers import DJQUEUE, PEERS, SLOTS

SVG = "{http://www.w3.org/2000/svg}"


def system(name, *rates, storage="Redis"):
    drains = {1: [Drain(rate, {"worker 0.1": 10.0, "redis": 5.0}) for rate in rates]}
    return System(name, storage, f"{name} 1.0", "`work`", drains)


def test_ratio_compares_values_of_same_run():
    ours, peer = system("djqueue", 100, 400, 90), system("other", 50, 100, 90)

    assert comparing.ratio(ours, peer, 1) == 2.0
    assert comparing.ratio(ours, peer, 10) is None


def test_table_has_djqueue_first_and_then_fastest():
    systems = [system("slow", 3), system("djqueue", 6.6), system("fast", 12_345.6)]

    rows = table(systems).splitlines()[2:]
    assert rows == [
        "| Redis | djqueue 1.0 |  | 6.6 | – | – | – | – | – | `work` |",
        "| Redis | fast 1.0 | 0.00053×, –, – | 12,300 | – | – | – | – | – | `work` |",
        "| Redis | slow 1.0 | 2.2×, –, – | 3 | – | – | – | – | – | `work` |",
    ]


def test_rewriting_docs_keeps_surrounding_text(tmp_path):
    page = tmp_path / "benchmarks.md"
    mark = "table: peers-redis -->\n"
    page.write_text(f"before\n<!-- {mark}old\n<!-- end of {mark}after\n")
    systems = [system("djqueue", 2), system("other", 1)]

    for _ in range(2):
        written = write_docs(
            systems,
            {"Gone": "could not be installed: npm is not installed"},
            1,
            [0.5, 2.0],
            ["peers-redis"],
            tmp_path,
        )

    text = page.read_text()
    assert written == [page, tmp_path / "_static" / "benchmarks" / "peers-redis.svg"]
    assert text.startswith(f"before\n<!-- {mark}| storage |")
    assert text.endswith(f"\n<!-- end of {mark}after\n")
    assert "old" not in text
    assert "Gone could not be installed: npm is not installed." in text
    assert "load average was 0.5" in text


def test_page_without_markers_is_unchanged():
    with pytest.raises(ValueError, match="no part between"):
        section("text", "peers", "table")


def test_row_has_cpu_time_and_goal_beside_rate():
    systems = [system("djqueue", 4, 6), system("BullMQ", 2, 2)]

    [row] = comparing.rows(systems[1], systems)

    assert row["cpu"] == {"worker": 10.0, "redis": 5.0}
    assert (row["djqueue"], row["goal"]) == (2.5, 1.0)
    assert "djqueue 2.50× (goal 1.0×)" in comparing.shown(row)


def test_chart_is_well_formed_and_self_contained():
    text = chart("Rates & more", [Panel("Redis <7>", (Bar("djqueue", 1234.5, True), Bar("x" * 8, 10.0)))])

    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert [one.text for one in root.iter(f"{SVG}text")] == [
        *("Rates & more", "Redis <7>", "djqueue", "1,234", "xxxxxxxx", "10"),
    ]
    bars = [one for one in root.iter(f"{SVG}rect") if one.get("class") != "page"]
    widths = [float(one.attrib["width"]) for one in bars]
    assert widths[0] > 100 * widths[1] * 0.9
    assert "prefers-color-scheme: dark" in text
    assert not [one for one in ("<script", "@import", "url(", "href", "<image") if one in text]


def test_charts_of_docs_show_systems_of_its_table():
    page = (DOCS / "benchmarks.md").read_text()

    for name, storages in SECTIONS.items():
        part = page.split(f"<!-- table: {name} -->\n")[1].split(f"<!-- end of table: {name} -->")[0]
        rows = [line.split(" | ") for line in part.splitlines() if line.startswith("| ")][1:]
        chart_of_docs = ElementTree.parse(DOCS / "_static" / "benchmarks" / f"{name}.svg")
        texts = {one.text for one in chart_of_docs.iter(f"{SVG}text")}
        systems = {row[1].split(" ")[0].lower() for row in rows if row[0].removeprefix("| ") in storages}
        assert systems
        assert systems <= {(text or "").lower() for text in texts}


def test_table_is_written_if_all_of_its_peers_were_measured():
    others = [peer for peer in PEERS if peer.storage != "Redis"]

    assert complete(others) == ["peers-others"]
    assert complete(others[1:]) == []
    assert complete(PEERS) == list(SECTIONS)


def test_each_peer_has_its_program_backlog_and_djqueue_on_its_storage():
    keys = [peer.key for peer in PEERS]

    assert len(set(keys)) == len(keys)
    for peer in PEERS:
        assert all((PROGRAMS / name).is_file() for name in (peer.program, *peer.files))
        assert set(peer.jobs) <= set(SLOTS)
        assert set(DJQUEUE[peer.storage]) == set(SLOTS)


def test_peer_that_cannot_be_installed_is_skipped_with_reason(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bullmq = [peer for peer in PEERS if peer.name == "BullMQ"]

    assert installed(bullmq) == ({}, {"BullMQ": "could not be installed: npm is not installed"})
    assert "not installable: npm is not installed" in capsys.readouterr().err
    with pytest.raises(NotInstallableError):
        node_environment("any", ("bullmq",), None)


def test_peer_that_fails_is_left_out_and_others_are_measured(monkeypatch):
    calls = []

    def drain_peer(system, machine, peer, environment, count, slots):
        calls.append((peer.name, slots))
        if peer.name == "SAQ" and slots == 10:
            raise PeerError("its worker ended\nlog")
        return peer_runs.note(system, slots, Drain(50.0), 20.0, 2**20)

    def drain_djqueue(system, machine, count, slots):
        return peer_runs.note(system, slots, Drain(100.0), None, 2**21)

    monkeypatch.setattr(peer_runs, "drain_peer", drain_peer)
    monkeypatch.setattr(peer_runs, "drain_djqueue", drain_djqueue)
    environments = {
        peer: Environment(PROGRAMS, dict.fromkeys(peer.packages, "1.0"))
        for peer in PEERS
        if peer.name in ("SAQ", "huey")
    }

    systems, failed = peer_runs.measure(None, environments, 2, 1.0)

    assert failed == {"SAQ, 10 at once on Redis,": "could not be measured: its worker ended"}
    assert calls.count(("SAQ", 10)) == 1
    rates = {one.name: {slots: len(drains) for slots, drains in one.drains.items()} for one in systems}
    assert rates["SAQ"] == {1: 2, 100: 2}
    assert rates["huey"] == rates["djqueue"] == {1: 2, 10: 2, 100: 2}
    assert {one.name: one.sizes for one in systems} == {
        "SAQ": {},
        "huey": {"bulk": [20.0, 20.0], "memory": [1.0, 1.0]},
        "djqueue": {"memory": [2.0, 2.0]},
    }
