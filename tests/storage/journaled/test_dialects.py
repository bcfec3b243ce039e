"""Each dialect's statements leave the same tables: its own, and the ORM's."""

import pytest
from django.db import connection
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djqueue import models
from djqueue.storage.tables import dialects, rows
from djqueue.storage.tables.dialects import dialect_for

pytestmark = pytest.mark.dialect

ODD_TEXTS = [
    "",
    "plain",
    'it\'s "quoted" `so` [and] so',
    "100 % %s %(name)s %%",
    "{braces} {0} {{}}",
    "?1 :name $1 @p",
    "back\\slash \\n",
    "two\nlines\r\n\ttabbed",
    "Größe 日本語 עברית 💥 e\u0301 \u200b \ufeff",
    "'; DROP TABLE djqueue_job; --",
    "\x01\x7f\x85\u2028",
    "x" * 5_000,
]
ODD_BYTES = [b"", bytes(range(256)), b"\x00" * 10, b"'\\x41'", "💥".encode(), b"y" * 70_000]
ODD_INTEGERS = [0, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)]

LOG = rows.LOG
RESULT = rows.RESULT


@pytest.fixture(params=["own", "orm"])
def dialect(request, tables):
    return dialect_for("default", orm=request.param == "orm")


def table(model, fields):
    """The rows of a table, as the database has them."""
    return sorted(rows.raw_values(model.objects.all(), fields), key=repr)


def as_plain(row):
    return tuple(bytes(value) if isinstance(value, memoryview) else value for value in row)


def result(queue, job_id, data=b"result", completed_at=1, expires_at=None):
    return (queue, job_id, "text/plain", data, completed_at, expires_at)


def results():
    return [as_plain(row) for row in table(models.JobResult, RESULT)]


def test_texts_bytes_numbers_and_null_round_trip(dialect):
    logged = [("q", f"id {at}", at, text) for at, text in enumerate(ODD_TEXTS)]
    kept = [
        result("q", f"id {at}", data, number, None if at % 2 else number)
        for at, (data, number) in enumerate(zip(ODD_BYTES, ODD_INTEGERS, strict=True))
    ]

    dialect.insert(models.JobLog, LOG, logged)
    dialect.insert(models.JobResult, RESULT, kept)

    assert table(models.JobLog, LOG) == sorted(logged, key=repr)
    assert results() == sorted(kept, key=repr)


def test_unusual_texts_identify_rows(dialect):
    named = [result(text, other) for text in ODD_TEXTS[1:-1] for other in ODD_TEXTS[1:-1]]
    dialect.insert(models.JobResult, RESULT, named)

    changed = named[::3]
    dialect.update(models.JobResult, rows.KEY, ("result",), [(*row[:2], b"changed") for row in changed])
    gone = dialect.delete(models.JobResult, rows.KEY, [row[:2] for row in named[1::3]])

    assert gone == len(named[1::3])
    expected = [(*row[:3], b"changed", *row[4:]) for row in changed] + named[2::3]
    assert results() == sorted(expected, key=repr)


def test_row_whose_key_is_taken_is_overwritten_constants_included(dialect):
    fields, constants = RESULT[:-1], {"expires_at": None}
    dialect.insert(
        models.JobResult, RESULT, [result("q", "a", b"old", 1, 99), result("q", "b", b"old", 1, 99)]
    )

    new = [row[:-1] for row in (result("q", "b", b"new", 2), result("q", "c", b"new", 2))]
    dialect.insert(models.JobResult, fields, new, constants=constants, key=rows.KEY)

    assert results() == [
        result("q", "a", b"old", 1, 99),
        result("q", "b", b"new", 2),
        result("q", "c", b"new", 2),
    ]


def test_insert_distinguishes_new_rows_from_taken_keys(dialect):
    taken = [result("q", "b", b"old")]
    dialect.insert(models.JobResult, RESULT, taken)

    with dialect.transaction():
        # As producers do it: what is there is known, but for what comes in between.
        wanted = [result("q", name) for name in "abc" if connection.vendor != "sqlite" or name != "b"]
        written = dialect.insert_new(models.JobResult, RESULT, wanted, key=rows.KEY)

    assert sorted(map(tuple, written)) == [("q", "a"), ("q", "c")]
    assert results() == [result("q", "a"), *taken, result("q", "c")]


def test_update_of_missing_row_changes_nothing(dialect):
    there = result("q", "a", completed_at=5)
    dialect.insert(models.JobResult, RESULT, [there])

    missing = [("q", "b", b"x"), ("other", "a", b"x"), ("Q", "a", b"x")]
    dialect.update(models.JobResult, rows.KEY, ("result",), missing)
    dialect.update(models.JobResult, (*rows.KEY, "completed_at"), ("result",), [("q", "a", 6, b"x")])
    gone = dialect.delete(models.JobResult, (*rows.KEY, "completed_at"), [("q", "a", 6), ("q", "b", 5)])

    assert gone == 0
    assert results() == [there]


def test_nothing_is_written_for_no_rows(dialect):
    dialect.insert(models.JobResult, RESULT, [])
    dialect.update(models.JobResult, rows.KEY, ("result",), [])

    assert dialect.insert_new(models.JobResult, RESULT, [], key=rows.KEY) == []
    assert dialect.delete(models.JobResult, rows.KEY, []) == 0
    assert results() == []


@pytest.mark.parametrize("count", [99, 100, 101, 350])
def test_many_rows_go_in_several_batches(dialect, monkeypatch, count):
    if hasattr(dialect, "BATCH"):
        monkeypatch.setattr(type(dialect), "BATCH", 100)
    many = [result("q", f"{at:05}", completed_at=at) for at in range(count)]

    dialect.insert(models.JobResult, RESULT, many)
    dialect.insert(models.JobResult, RESULT, many, key=rows.KEY)
    dialect.update(models.JobResult, rows.KEY, ("expires_at",), [(*row[:2], row[4]) for row in many])
    gone = dialect.delete(models.JobResult, rows.KEY, [row[:2] for row in many[:-1]])

    assert gone == count - 1
    assert results() == [result("q", f"{count - 1:05}", completed_at=count - 1, expires_at=count - 1)]


def test_transaction_that_fails_leaves_nothing(dialect):
    def fails():
        with dialect.transaction(durable=True):
            dialect.insert(models.JobResult, RESULT, [result("q", "a")])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()

    assert results() == []


def test_durable_transaction_is_synced_despite_database_settings(dialect):
    usual, during, synced = {
        "sqlite": ("PRAGMA synchronous=OFF", "PRAGMA synchronous", 2),
        "postgresql": ("SET synchronous_commit TO off", "SHOW synchronous_commit", "on"),
    }[connection.vendor]

    def setting():
        with connection.cursor() as cursor:
            cursor.execute(during)
            return cursor.fetchone()[0]

    if isinstance(dialect, dialects.OrmDialect) and connection.vendor == "postgresql":
        pytest.skip("the ORM knows no such setting")
    with connection.cursor() as cursor:
        cursor.execute(usual)
    try:
        before = setting()
        with dialect.transaction():
            assert setting() == before != synced
        with dialect.transaction(durable=True):
            dialect.insert(models.JobResult, RESULT, [result("q", "a")])
            assert setting() == synced
        assert setting() == before
    finally:
        connection.close()


IDS = st.sampled_from(["a", "b", "%s", "{}", "it's"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.lists(st.tuples(IDS, st.binary(max_size=3)), max_size=4)),
        st.tuples(st.just("update"), st.lists(st.tuples(IDS, st.binary(max_size=3)), max_size=4)),
        st.tuples(st.just("delete"), st.lists(st.tuples(IDS, st.just(b"")), max_size=4)),
    ),
    max_size=8,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_any_sequence_leaves_rows_that_dictionary_would_hold(dialect, steps):
    models.JobResult.objects.all().delete()
    expected = {}
    for operation, changes in steps:
        latest = dict(changes)  # a buffer holds one change of a job
        if operation == "insert":
            expected.update(latest)
            found = [result("q", name, data) for name, data in latest.items()]
            dialect.insert(models.JobResult, RESULT, found, key=rows.KEY)
        elif operation == "update":
            expected.update({name: data for name, data in latest.items() if name in expected})
            found = [("q", name, data) for name, data in latest.items()]
            dialect.update(models.JobResult, rows.KEY, ("result",), found)
        else:
            gone = dialect.delete(models.JobResult, rows.KEY, [("q", name) for name in latest])
            assert gone == len([expected.pop(name) for name in latest if name in expected])

    assert {row[1]: row[3] for row in results()} == expected
