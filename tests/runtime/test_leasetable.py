"""The table that a worker shares with its lease keeper, and the times at which the keeper renews."""

import threading

import pytest

from djqueue.core.job import Lease
from djqueue.runtime.leases import LeaseTable, LeaseTableView, RenewalPolicy, TornReadError

LEASE = 12_000
BIG = 1 << 90
"""Redis's tokens have more than 64 bits."""


@pytest.fixture
def table():
    made = LeaseTable(LEASE)
    yield made
    made.close()


def test_lease_table_reader_sees_added_and_replaced_claims(table):
    table.add([Lease("a", "1", 1), Lease("b", "ü:{2}", BIG)])
    table.add([Lease("a", "3", 3)])
    added = table.read().leases
    table.replace([Lease("a", "3", 3)])
    table.add([Lease("a", "4", 4)])

    assert added == [Lease("a", "1", 1), Lease("b", "ü:{2}", BIG), Lease("a", "3", 3)]
    assert table.read().leases == [Lease("a", "3", 3), Lease("a", "4", 4)]


def test_full_lease_table_rejects_claims_until_others_are_replaced(table):
    many = [Lease("q" * 200, f"{number}", number) for number in range(1_000)]
    added = 0
    while table.add(many):
        added += 1

    assert table.read().leases == many * added
    table.replace(many[:2])
    assert table.read().leases == many[:2]
    assert table.add(many)


def test_lease_table_shows_worker_activity_and_shortest_lease(table):
    table.show_life(77)
    table.expect(3_000)
    table.expect(5_000)

    assert table.read() == LeaseTableView(77, 3_000, [])


class Recorded:
    """A storage that notes what is renewed."""

    def __init__(self) -> None:
        self.renewed: list[list[Lease]] = []
        self.fails = False

    def renew(self, leases):
        if self.fails:
            raise OSError("away")
        self.renewed.append(leases)


def seen(beat: int, leases: list[Lease] | None = None) -> LeaseTableView:
    return LeaseTableView(beat, LEASE, [Lease("a", "1", 1)] if leases is None else leases)


def test_lease_keeper_does_nothing_while_its_worker_responds():
    storage = Recorded()
    keeping = RenewalPolicy(storage, 60_000)

    keeping.look(seen(beat=0), now=1_000_000)
    keeping.look(seen(beat=999_000), now=1_000_000)

    assert storage.renewed == []


def test_lease_keeper_renews_leases_of_silent_worker_until_stuck_timeout(caplog):
    storage = Recorded()
    keeping = RenewalPolicy(storage, 60_000)

    for now in range(0, 120_000, 500):
        keeping.look(seen(beat=1), now)

    assert len(storage.renewed) == pytest.approx(60_000 / (LEASE / 4), abs=2)
    assert "will run again" in caplog.text


def test_lease_keeper_retries_failed_renewals_at_its_next_check(caplog):
    storage = Recorded()
    storage.fails = True
    keeping = RenewalPolicy(storage, 60_000)

    keeping.look(seen(beat=1), now=10_000)
    storage.fails = False
    keeping.look(seen(beat=1), now=10_001)

    assert "could not renew the leases, retrying: away" in caplog.text
    assert storage.renewed == [[Lease("a", "1", 1)]]


def test_lease_table_reader_never_sees_a_partial_change(table):
    many = [Lease("queue", f"job-{number}", BIG + number) for number in range(200)]
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            for count in (200, 3, 120):
                table.replace(many[:count])
                table.show_life(count)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        sizes = {len(table.read().leases) for _ in range(300)}
    finally:
        over.set()
        writer.join()

    assert sizes <= {0, 3, 120, 200}


def test_lease_table_reader_reports_an_unfinished_change(table):
    table.replace([Lease("a", "1", 1)])
    table._step()

    with pytest.raises(TornReadError):
        table.read()
