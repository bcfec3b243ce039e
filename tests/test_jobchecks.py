"""System checks of job types."""

import os
from io import StringIO
from typing import Any

import pytest
from django.core.checks import CheckMessage, run_checks
from django.core.management import call_command

from djqueue import Permissions, job
from djqueue.client import registry
from djqueue.errors import OptionError


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_types", {})


def plain() -> None: ...


async def awaited() -> None: ...


def found(settings: Any, given: Any, *, deploy: bool = False) -> dict[str | None, CheckMessage]:
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}, **given}
    messages = run_checks(tags=["djqueue"], databases=[], include_deployment_checks=deploy)
    return {message.id: message for message in messages}


# Limits.


@pytest.mark.parametrize("given", [{}, {"QUEUES": {"heavy": {"EXECUTOR": "isolated"}}}])
def test_limits_of_an_inline_job_are_a_warning(settings: Any, given: Any) -> None:
    job(name="render", limits={"memory": "256 MiB", "cpu": 5})(plain)

    message = found(settings, given)["djqueue.W017"]

    assert message.msg == (
        "Job 'render': its limits (memory, cpu) have no effect, "
        "because jobs in the queue 'default' run inline."
    )
    assert "executor='isolated'" in str(message.hint)


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"executor": "subprocess"}, {}),
        ({}, {"EXECUTOR": "isolated"}),
        ({"queue": "heavy"}, {"QUEUES": {"heavy": {"EXECUTOR": "isolated"}}}),
        ({"permissions": Permissions()}, {}),
        ({}, {"DEFAULTS": {"queue": "heavy"}, "QUEUES": {"heavy": {"EXECUTOR": "isolated"}}}),
    ],
    ids=str,
)
def test_limits_of_a_job_in_a_process_are_accepted(settings: Any, options: Any, given: Any) -> None:
    job(name="render", limits={"cpu": 5}, **options)(plain)

    assert found(settings, given) == {}


@pytest.mark.parametrize("options", [{"executor": "inline"}, {"batch": 5}], ids=str)
def test_limits_of_an_inline_only_job_are_rejected(options: Any) -> None:
    with pytest.raises(OptionError, match=r"^limits: .* in the worker, which has no limits"):
        job(name="render", limits={"cpu": 5}, **options)(plain)


@pytest.mark.django_db
def test_command_with_checks_shows_the_warning_at_start(settings: Any) -> None:
    job(name="render", limits={"cpu": 5})(plain)
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}}
    output = StringIO()

    call_command("runworkers", until_empty=True, skip_checks=False, stdout=StringIO(), stderr=output)

    assert "(djqueue.W017) Job 'render': its limits (cpu) have no effect" in output.getvalue()


# Timeouts.


def test_non_interrupting_timeouts_are_reported_once_for_deployment(settings: Any) -> None:
    for number in range(7):
        job(name=f"slow-{number}", timeout=30)(plain)

    assert found(settings, {}) == {}
    message = found(settings, {}, deploy=True)["djqueue.I003"]
    assert "run inline: slow-0, slow-1, slow-2, slow-3, slow-4 and 2 more. " in message.msg


@pytest.mark.parametrize(
    ("function", "options"),
    [(awaited, {"timeout": 5}), (plain, {}), (plain, {"timeout": 5, "executor": "isolated"})],
    ids=["async", "without a timeout", "isolated"],
)
def test_interrupting_timeout_is_not_reported(settings: Any, function: Any, options: Any) -> None:
    job(name="quick", **options)(function)

    assert found(settings, {}, deploy=True) == {}


# Permissions.


def test_unknown_database_is_an_error_with_the_nearest_alias(settings: Any) -> None:
    job(name="reads", permissions=Permissions(db=["defualt"]))(plain)

    message = found(settings, {})["djqueue.E011"]

    assert message.msg == (
        "Job 'reads': permissions: db: 'defualt' is not in DATABASES; did you mean 'default'?"
    )


@pytest.mark.parametrize(("user", "expected"), [(0, {"djqueue.W018"}), (1_000, set())])
def test_permissions_under_root_are_a_deployment_warning(
    settings: Any, monkeypatch: pytest.MonkeyPatch, user: int, expected: set[str]
) -> None:
    job(name="reads", permissions=Permissions(db=["default"]))(plain)
    monkeypatch.setattr(os, "geteuid", lambda: user)

    assert found(settings, {}) == {}
    assert set(found(settings, {}, deploy=True)) == expected


def test_root_without_permissions_is_accepted(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job(name="plain")(plain)
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    assert found(settings, {}, deploy=True) == {}
