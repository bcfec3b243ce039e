"""Snapshot records are validated: a storage gets no value that it would not write itself."""

from dataclasses import fields
from typing import Any

import pytest

from djqueue.core.errors import OptionError
from djqueue.core.options import JobOptions
from djqueue.storage.memory import MemoryStorage
from djqueue.storage.snapshotchecks import CHECKS, OPTIONS, check_part
from djqueue.storage.snapshots import JOB, SCHEDULE, Part
from djqueue.testing import factories as f
from djqueue.testing.contract.snapshots import fill, read_all

ODD = (4 * 10**12, -(2**70), {"x": [1]}, [[1]], 0.5, b"x", "\udcff", True)
"""Values of which a key accepts at most those that are of its own type."""


@pytest.fixture(scope="module")
def parts() -> list[Part]:
    storage = MemoryStorage()
    fill(storage)
    f.an_active_job(storage, id="active", queue="active")
    return read_all(storage)


def is_refused(part: Part) -> bool:
    try:
        check_part(part)
    except OptionError as error:
        return str(error).startswith("snapshot: ")
    return False


def test_each_option_of_a_job_has_a_check() -> None:
    assert set(OPTIONS) == {option.name for option in fields(JobOptions) if option.init}


def test_snapshot_parts_of_a_storage_are_accepted(parts: list[Part]) -> None:
    assert {part.kind for part in parts} == {*CHECKS} - {SCHEDULE}
    assert not [part for part in parts if is_refused(part)]


@pytest.mark.parametrize("kind", [kind for kind in CHECKS if kind != SCHEDULE])
def test_snapshot_keys_reject_values_of_another_type(parts: list[Part], kind: str) -> None:
    part = next(part for part in parts if part.kind == kind)
    [record, *_] = part.records
    for key in CHECKS[kind].keys() - {"progress"}:
        accepted = {
            type(value) for value in ODD if not is_refused(part._replace(records=[{**record, key: value}]))
        }
        assert len(accepted) <= 1, f"{key} accepts {accepted}"
        assert is_refused(part._replace(records=[{name: record[name] for name in record if name != key}]))


@pytest.mark.parametrize("name", OPTIONS)
def test_snapshot_options_reject_values_of_another_type(parts: list[Part], name: str) -> None:
    part = next(part for part in parts if part.kind == JOB)
    accepted = set()
    for value in ODD:
        options = {**part.records[0]["options"], name: value}
        if not is_refused(part._replace(records=[{**part.records[0], "options": options}])):
            accepted.add(type(value))
    assert len(accepted) <= 1, f"{name} accepts {accepted}"


@pytest.mark.parametrize(
    "part",
    [
        Part("what", "q", []),
        Part([JOB], "q", []),  # type: ignore[arg-type]
        Part(JOB, "", []),
        Part(JOB, b"q", []),  # type: ignore[arg-type]
        Part(SCHEDULE, "q", []),
        Part(JOB, "q", ["x"]),  # type: ignore[list-item]
        Part(JOB, "q", [None]),  # type: ignore[list-item]
    ],
)
def test_malformed_snapshot_part_is_rejected(part: Part) -> None:
    assert is_refused(part)


@pytest.mark.parametrize("key", ["id", "name"])
@pytest.mark.parametrize("value", ["x" * 256, "a\0b", "\udcff"])
def test_snapshot_rejects_names_that_enqueue_rejects(parts: list[Part], key: str, value: str) -> None:
    part = next(part for part in parts if part.kind == JOB)
    assert is_refused(part._replace(records=[{**part.records[0], key: value}]))


@pytest.mark.parametrize("headers", ["[1]", "{", "[" * 100_000])
def test_snapshot_headers_must_be_a_json_object(parts: list[Part], headers: Any) -> None:
    part = next(part for part in parts if part.kind == JOB)
    assert is_refused(part._replace(records=[{**part.records[0], "options": {"headers": headers}}]))
