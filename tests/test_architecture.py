"""The package's structure: what importing it loads, vendored files and class names."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "djqueue"
VENDORED = [ROOT / "static" / "djqueue" / "vendor", ROOT / "tests" / "dashboard" / "vendor"]
OPTIONAL = {
    *("celery", "django_redis", "django_tasks", "hiredis", "opentelemetry", "prometheus_client"),
    *("pyspark", "redis", "uvloop"),
}


def test_importing_djqueue_loads_no_optional_package():
    assert loaded_by("from djqueue import Queue, Worker, job") & OPTIONAL == set()


def test_starting_django_with_djqueue_loads_no_optional_package():
    assert loaded_by("import django; django.setup()") & OPTIONAL == set()


def test_default_codec_does_not_load_kombu():
    assert "kombu" not in loaded_by("import django; django.setup(); import djqueue.codecs")


NEEDED_AT_START = {"", "_version", "apps", "contrib", "fields", "migrations", "models", "storage.chores"}
"""Modules of djqueue that `django.setup()` may load, besides those of the engine that these import."""


def test_starting_django_loads_only_models_and_their_dependencies():
    apps = ["django.contrib.auth", "django.contrib.contenttypes"]
    with_djqueue = loaded_by_setup([*apps, "djqueue", "djqueue.contrib.spark"])

    more = with_djqueue - loaded_by_setup(apps)
    parts = {name.removeprefix("djqueue").removeprefix(".") for name in more if name.startswith("djqueue")}
    assert {name for name in more if not name.startswith("djqueue")} == set()
    assert {
        part
        for part in parts - {"core", "storage"}
        if not part.startswith("core.") and part not in NEEDED_AT_START
        if not part.startswith(("contrib.spark", "models."))
    } == set()
    assert parts & {"core.engine", "core.job", "contrib.spark.writing"} == set()


@pytest.mark.parametrize("vendor", VENDORED, ids=lambda folder: folder.parent.name)
def test_vendored_files_match_their_checksums_and_include_licenses(vendor):
    """`SHA256SUMS`, in the format of sha256sum, names every file; each folder contains its license."""
    files = {p.relative_to(vendor).as_posix(): p for p in vendor.rglob("*") if p.is_file()}
    lines = files.pop("SHA256SUMS").read_text().splitlines()
    sums = dict(reversed(line.split(maxsplit=1)) for line in lines)

    assert sums == {name: hashlib.sha256(p.read_bytes()).hexdigest() for name, p in files.items()}
    for name, path in files.items():
        assert list(path.parent.glob("LICENSE*")), f"{name} has no license beside it"


def loaded_by_setup(installed_apps: list[str]) -> set[str]:
    """The modules that a new interpreter has loaded after Django's start."""
    return modules_after(
        "import django\nfrom django.conf import settings\n"
        f"settings.configure(INSTALLED_APPS={installed_apps!r})\ndjango.setup()"
    )


def loaded_by(statement: str) -> set[str]:
    """The top-level packages that a new interpreter has loaded after a statement."""
    return {name.partition(".")[0] for name in modules_after(statement)}


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return set(finished.stdout.split())


ONE_NAME_TWO_CLASSES = {
    "Command",
    "Media",
    "Meta",
    "Migration",
    "LimiterState",
    "SchedulerLease",
    "SchedulerStorage",
}
"""Names that Django prescribes, and models that mirror a class of the same name."""


def test_class_names_are_unique_in_the_package() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall(r"^ *class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            if name not in ONE_NAME_TWO_CLASSES:
                found.setdefault(name, []).append(str(path.relative_to(PACKAGE)))

    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
