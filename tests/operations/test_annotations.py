"""Marks: of versions that begin to run, and by hand."""

from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from djqueue.client.storages import close_storage
from djqueue.core.durations import to_datetime
from djqueue.core.errors import OptionError
from djqueue.core.options import DAY
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


def test_another_version_is_marked_once_and_one_that_comes_back_again(settings: Any) -> None:
    storage = MemoryStorage()
    for version in ("v1", "v1", "v2", "v2", "v1"):
        says(settings, version)
        annotate_version(storage, NOW)
    assert labels() == ["v1", "v2", "v1"]


def test_without_the_setting_nothing_is_marked() -> None:
    annotate_version(MemoryStorage())
    assert labels() == []


def test_what_is_marked_by_hand_does_not_count_as_the_last_version(settings: Any) -> None:
    says(settings, "v1")
    annotate_version(MemoryStorage(), NOW)
    annotate("default", "v2", NOW + 1)
    annotate_version(MemoryStorage(), NOW + 2)
    assert labels() == ["v1", "v2"]


@pytest.mark.dialect
def test_of_two_that_start_at_once_one_marks(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_old_marks_go_but_not_the_version_that_runs(settings: Any) -> None:
    says(settings, "v1", METRICS={"DAY": 10 * 86_400})
    annotate_version(MemoryStorage(), NOW)
    annotate("default", "old", NOW)
    annotate("default", "new", NOW + 11 * DAY)
    assert labels() == ["v1", "new"]


@pytest.mark.parametrize("wrong", ["", "   ", "a\nb", "x" * 256])
def test_a_label_that_cannot_be_shown_is_refused(wrong: str) -> None:
    with pytest.raises(OptionError):
        annotate("default", wrong)
    assert labels() == []


def test_without_tables_workers_start_without_marks(settings: Any) -> None:
    says(settings, "v1")
    with connection.execute_wrapper(_no_such_table):
        annotate_version(MemoryStorage())
    assert labels() == []


def test_the_command_marks_this_moment() -> None:
    output = StringIO()
    call_command(djqueue.Command(), "mark", " v1.2 ", stdout=output)
    assert output.getvalue() == "Added annotation: v1.2\n"
    assert labels() == ["v1.2"]
    with pytest.raises(CommandError, match="label"):
        call_command(djqueue.Command(), "mark", "")


def test_workers_mark_the_version_that_they_start_with(settings: Any) -> None:
    says(settings, "2026.11")
    call_command(runworkers.Command(), "--until-empty", verbosity=0, stderr=StringIO())
    assert labels() == ["2026.11"]


def _no_such_table(execute: Any, sql: str, *given: Any) -> Any:
    return execute(sql.replace("djqueue_annotation", "djqueue_nothing"), *given)
