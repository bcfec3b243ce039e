"""Autodiscovery: the `jobs` module of every installed app is imported at start-up."""

import sys

import pytest
from django.core.checks import ERROR
from django.test import override_settings

from djqueue import Queue
from djqueue.checks import check_settings
from djqueue.client import registry
from djqueue.testing.assertions import assert_enqueued

SHOP = "tests.client.shop"


@pytest.fixture
def _not_imported(monkeypatch):
    for name in list(sys.modules):
        if name.startswith(SHOP):
            monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def _with_the_shop(_not_imported, settings):
    with override_settings(INSTALLED_APPS=[*settings.INSTALLED_APPS, SHOP]):
        yield


def test_jobs_of_apps_that_are_not_installed_are_not_imported():
    assert registry.names() == []


@pytest.mark.usefixtures("_with_the_shop")
def test_jobs_of_installed_apps_are_registered_by_dotted_path():
    assert registry.names() == ["tests.client.shop.jobs.send_receipt"]


@pytest.mark.usefixtures("_with_the_shop")
def test_discovered_job_runs_from_enqueue_to_result(djqueue_drain):
    from tests.client.shop.jobs import send_receipt

    answer = send_receipt.enqueue(42)
    assert_enqueued(send_receipt, args=(42,), queue="emails", count=1)

    assert djqueue_drain().completed == 1
    assert Queue("emails").get_result(answer.id) == "receipt of 42"


DEPOT = "tests.client.depot"


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        ([], []),
        (["tasks"], [f"{DEPOT}.tasks.pack"]),
        ([f"{DEPOT}.inner.background"], [f"{DEPOT}.inner.background.count"]),
        (["tasks", f"{DEPOT}.inner.background"], [f"{DEPOT}.inner.background.count", f"{DEPOT}.tasks.pack"]),
    ],
)
def test_modules_setting_imports_further_modules(settings, monkeypatch, modules, names):
    for name in list(sys.modules):
        if name.startswith(DEPOT):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(registry, "discovered", None)
    settings.DJQUEUE = {**settings.DJQUEUE, "MODULES": modules}

    with override_settings(INSTALLED_APPS=[*settings.INSTALLED_APPS, DEPOT]):
        assert registry.names() == names
        assert registry.discovered == frozenset(names)


def test_missing_module_of_the_modules_setting_fails_the_check(settings):
    settings.DJQUEUE = {**settings.DJQUEUE, "MODULES": ["nowhere.to_be.found"]}

    with override_settings(INSTALLED_APPS=[*settings.INSTALLED_APPS, DEPOT]):
        found = check_settings()

    assert [message.id for message in found if message.level >= ERROR] == ["djqueue.E010"]


def test_app_without_jobs_module_is_accepted(settings):
    with override_settings(INSTALLED_APPS=[*settings.INSTALLED_APPS, "tests.client"]):
        assert registry.names() == []


def test_modules_in_a_package_of_jobs_are_imported(settings, tmp_path, monkeypatch):
    folder = tmp_path / "parcel_shop" / "jobs"
    (folder / "letters").mkdir(parents=True)
    for name in ("../__init__", "__init__", "letters/__init__"):
        (folder / f"{name}.py").touch()
    for name in ("mail", "letters/stamps"):
        (folder / f"{name}.py").write_text("from djqueue import job\n\n@job\ndef send(): ...\n")
    (folder / "test_mail.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)

    with override_settings(INSTALLED_APPS=[*settings.INSTALLED_APPS, "parcel_shop"]):
        assert registry.names() == ["parcel_shop.jobs.letters.stamps.send", "parcel_shop.jobs.mail.send"]


def test_import_error_in_a_jobs_module_is_not_hidden(settings, tmp_path, monkeypatch):
    app = tmp_path / "broken_shop"
    app.mkdir()
    (app / "__init__.py").touch()
    (app / "jobs.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)

    with (
        pytest.raises(ImportError, match="a_module_that_is_not_there"),
        override_settings(INSTALLED_APPS=[*settings.INSTALLED_APPS, "broken_shop"]),
    ):
        pass
