"""Annotations: of versions that start to run, and manual ones."""

from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from djqueue.client.storages import close_storage
from djqueue.core.errors import OptionError
from djqueue.core.options import DAY
from djqueue.core.units import to_datetime
from djqueue.management.commands import djqueue, runworkers
from djqueue.models import Annotation
from djqueue.operations.annotations import annotate, annotate_version
from djqueue.storage.memory import MemoryStorage

NOW = 1_700_000_000_000


@pytest.fixture(autouse=True)
def fresh(settings: Any, tables: None) -> Any:
    says(settings, None)
    yield
    close_storage()


def says(settings: Any, version: str | None, **more: Any) -> None:
    memory = {"BACKEND": "djqueue.storage.memory.MemoryStorage"}
    settings.DJQUEUE = {"STORAGE": memory, "VERSION": version, **more}


def labels() -> list[str]:
    return list(Annotation.objects.order_by("id").values_list("label", flat=True))


def test_each_change_of_version_is_annotated_once(settings: Any) -> None:
    storage = MemoryStorage()
    for version in ("v1", "v1", "v2", "v2", "v1"):
        says(settings, version)
        annotate_version(storage, NOW)
    assert labels() == ["v1", "v2", "v1"]


def test_no_annotation_is_made_without_a_version() -> None:
    annotate_version(MemoryStorage())
    assert labels() == []


def test_manual_annotation_does_not_count_as_the_last_version(settings: Any) -> None:
    says(settings, "v1")
    annotate_version(MemoryStorage(), NOW)
    annotate("default", "v2", NOW + 1)
    annotate_version(MemoryStorage(), NOW + 2)
    assert labels() == ["v1", "v2"]


@pytest.mark.dialect
def test_two_workers_starting_together_make_one_annotation(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has looked before the first has written."""
    from djqueue.operations import annotations

    says(settings, "v2")
    old = Annotation.objects.create(at=to_datetime(NOW), label="v1", follows=0)
    annotate_version(MemoryStorage(), NOW + 1)
    real = annotations._last
    seen = iter([old])
    monkeypatch.setattr(annotations, "_last", lambda alias: next(seen, None) or real(alias))
    annotate_version(MemoryStorage(), NOW + 2)
    assert labels() == ["v1", "v2"]

    says(settings, "v3")
    seen = iter([old])
    annotate_version(MemoryStorage(), NOW + 3)
    assert labels() == ["v1", "v2", "v3"]


def test_old_annotations_are_removed_except_the_running_version(settings: Any) -> None:
    says(settings, "v1", METRICS={"DAY": 10 * 86_400})
    annotate_version(MemoryStorage(), NOW)
    annotate("default", "old", NOW)
    annotate("default", "new", NOW + 11 * DAY)
    assert labels() == ["v1", "new"]


@pytest.mark.parametrize("wrong", ["", "   ", "a\nb", "x" * 256])
def test_invalid_annotation_label_is_rejected(wrong: str) -> None:
    with pytest.raises(OptionError):
        annotate("default", wrong)
    assert labels() == []


def test_workers_start_without_annotation_tables(settings: Any) -> None:
    says(settings, "v1")
    with connection.execute_wrapper(_no_such_table):
        annotate_version(MemoryStorage())
    assert labels() == []


def test_annotate_command_annotates_the_current_time() -> None:
    output = StringIO()
    call_command(djqueue.Command(), "mark", " v1.2 ", stdout=output)
    assert output.getvalue() == "Added annotation: v1.2\n"
    assert labels() == ["v1.2"]
    with pytest.raises(CommandError, match="label"):
        call_command(djqueue.Command(), "mark", "")


def test_workers_annotate_their_version_at_start(settings: Any) -> None:
    says(settings, "2026.11")
    call_command(runworkers.Command(), "--until-empty", verbosity=0, stderr=StringIO())
    assert labels() == ["2026.11"]


def _no_such_table(execute: Any, sql: str, *given: Any) -> Any:
    return execute(sql.replace("djqueue_annotation", "djqueue_nothing"), *given)
