"""The shape of the package: who imports whom, what importing it costs, what is vendored."""

import ast
import hashlib
import os
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


def test_imports_follow_the_rules():
    # In a process of its own: it sets up logging anew.
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize(
    "statement",
    [
        "import djqueue",
        "from djqueue import Queue, Worker, job",
        "import django; django.setup()",
    ],
)
def test_importing_djqueue_loads_no_optional_package(statement):
    assert loaded_by(statement) & OPTIONAL == set()


def test_kombu_is_loaded_by_other_codecs_than_the_default_only():
    assert "kombu" not in loaded_by("import django; django.setup(); import djqueue.codecs")


NEEDED_AT_START = {"", "_version", "apps", "contrib", "fields", "migrations", "models", "storage.chores"}
"""Modules of djqueue that `django.setup()` may load, besides those of the engine that these import."""


def test_starting_django_loads_the_models_and_little_else():
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
    assert parts & {"core.engine", "core.job", "core.queue", "contrib.spark.writing"} == set()


@pytest.mark.parametrize("vendor", VENDORED, ids=lambda folder: folder.parent.name)
def test_vendored_files_are_the_published_ones_and_bring_their_licences(vendor):
    """`SHA256SUMS`, in the format of sha256sum, names every file; a folder's licence lies in it."""
    files = {p.relative_to(vendor).as_posix(): p for p in vendor.rglob("*") if p.is_file()}
    lines = files.pop("SHA256SUMS").read_text().splitlines()
    sums = dict(reversed(line.split(maxsplit=1)) for line in lines)

    assert sums == {name: hashlib.sha256(p.read_bytes()).hexdigest() for name, p in files.items()}
    for name, path in files.items():
        assert list(path.parent.glob("LICENSE*")), f"{name} has no licence beside it"


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


ONE_NAME_TWO_CLASSES = {"Command", "Media", "Meta", "Migration", "LimiterState", "SchedulerLease"}
"""Names that Django prescribes, and models that mirror a class of the same name."""


def test_each_class_name_has_one_meaning() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name not in ONE_NAME_TWO_CLASSES:
                found.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))

    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


LONGEST_FILE = 500
"""Lines. The conformance suite lists cases, and may be longer."""


def test_no_file_is_too_long_to_read() -> None:
    long = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if "contract" not in path.parts
        and (lines := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_FILE
    }

    assert long == {}
