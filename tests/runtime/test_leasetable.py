"""What a worker shows its lease keeper, and when the keeper renews."""

import threading

import pytest

from djqueue.core.job import Lease
from djqueue.runtime.leasekeeper import Keeping
from djqueue.runtime.leasetable import LeaseTable, LeaseTableView, TornReadError
from djqueue.storage.capabilities import Capabilities

LEASE = 12_000
BIG = 1 << 90
"""Redis's tokens have more than 64 bits."""


@pytest.fixture
def table():
    made = LeaseTable(LEASE)
    yield made
    made.close()


def test_a_reader_sees_what_was_added_and_what_replaced_it(table):
    table.add([Lease("a", "1", 1), Lease("b", "ü:{2}", BIG)])
    table.add([Lease("a", "3", 3)])
    added = table.read().leases
    table.replace([Lease("a", "3", 3)])
    table.add([Lease("a", "4", 4)])

    assert added == [Lease("a", "1", 1), Lease("b", "ü:{2}", BIG), Lease("a", "3", 3)]
    assert table.read().leases == [Lease("a", "3", 3), Lease("a", "4", 4)]


def test_claims_that_do_not_fit_are_refused_until_the_others_are_replaced(table):
    many = [Lease("q" * 200, f"{number}", number) for number in range(1_000)]
    added = 0
    while table.add(many):
        added += 1

    assert table.read().leases == many * added
    table.replace(many[:2])
    assert table.read().leases == many[:2]
    assert table.add(many)


def test_a_table_shows_life_the_shortest_lease_and_the_schedulers_claim(table):
    table.show_life(77)
    table.expect(3_000)
    table.expect(5_000)
    table.set_scheduler_claim(b"holder 3", 2_000)

    assert table.read() == LeaseTableView(77, 2_000, [], b"holder 3")


class Recorded:
    """A storage that notes what is renewed."""

    def __init__(self) -> None:
        self.renewed: list[list[Lease]] = []
        self.claims: list[bytes] = []
        self.fails = False
        self.capabilities = Capabilities(scheduler=RecordedRole(self.claims))

    def renew(self, leases):
        if self.fails:
            raise OSError("away")
        self.renewed.append(leases)


class RecordedRole:
    """The role of the scheduler, which notes the renewed claims."""

    def __init__(self, claims: list[bytes]) -> None:
        self._claims = claims

    def renew(self, claim):
        self._claims.append(claim)


def seen(beat: int, leases: list[Lease] | None = None, claim: bytes = b"") -> LeaseTableView:
    return LeaseTableView(beat, LEASE, [Lease("a", "1", 1)] if leases is None else leases, claim)


def test_a_worker_that_shows_life_is_left_alone():
    storage = Recorded()
    keeping = Keeping(storage, 60_000)

    keeping.look(seen(beat=0), now=1_000_000)
    keeping.look(seen(beat=999_000), now=1_000_000)

    assert storage.renewed == []


def test_the_leases_of_a_silent_worker_are_renewed_several_times_in_a_lease_until_patience_ends(caplog):
    storage = Recorded()
    keeping = Keeping(storage, 60_000)

    for now in range(0, 120_000, 500):
        keeping.look(seen(beat=1), now)

    assert len(storage.renewed) == pytest.approx(60_000 / (LEASE / 4), abs=2)
    assert "will run again" in caplog.text


def test_leases_that_could_not_be_renewed_are_tried_again_at_the_next_look(caplog):
    storage = Recorded()
    storage.fails = True
    keeping = Keeping(storage, 60_000)

    keeping.look(seen(beat=1), now=10_000)
    storage.fails = False
    keeping.look(seen(beat=1), now=10_001)

    assert "could not renew the leases, retrying: away" in caplog.text
    assert storage.renewed == [[Lease("a", "1", 1)]]


def test_a_silent_scheduler_keeps_its_place():
    storage = Recorded()

    Keeping(storage, 60_000).look(seen(beat=1, claim=b"holder 3"), now=10_000)

    assert (storage.claims, storage.renewed) == ([b"holder 3"], [])


def test_a_reader_never_sees_half_of_a_change(table):
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


def test_a_reader_says_that_a_change_was_not_ended(table):
    table.replace([Lease("a", "1", 1)])
    table._step()

    with pytest.raises(TornReadError):
        table.read()
