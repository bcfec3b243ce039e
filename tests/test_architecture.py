"""The package's structure: what importing it loads, vendored files, class names and imports."""

import ast
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
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
    # Modules that are part of the interpreter cost nothing.
    assert {name for name in more if not name.startswith("djqueue")} <= {*sys.builtin_module_names}
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


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for types and inside functions count, too."""
    assert import_circle(imports_below(PACKAGE)) == []


def test_import_circles_are_found_wherever_the_imports_are(tmp_path) -> None:
    package = tmp_path / "shop"
    package.mkdir()
    modules = {
        "__init__": "__all__ = ['order']",
        "order": "from shop.cart import Cart",
        "cart": "if TYPE_CHECKING:\n    from .price import Price",
        "price": "def total():\n    from . import order",
        "stock": "import shop.order",
    }
    for name, text in modules.items():
        (package / f"{name}.py").write_text(text)

    graph = imports_below(package)
    assert graph["shop.stock"] == {"shop.order"}
    assert set(import_circle(graph)) == {"shop.order", "shop.cart", "shop.price"}

    (package / "price.py").write_text("import shop")
    assert import_circle(imports_below(package)) == [], "the package itself imports nothing"

    (package / "__init__.py").write_text("from .stock import count")
    assert set(import_circle(imports_below(package))) == {
        *("shop", "shop.stock", "shop.order", "shop.cart", "shop.price"),
    }


def import_circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one circle, or []."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def imports_below(package: Path) -> dict[str, set[str]]:
    """Return the modules of a package, each with those that it imports; a package is its `__init__`."""
    modules = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {
        name: {found for found in imported_names(path, package.parent, modules) if found != name}
        for name, path in modules.items()
    }


def imported_names(path: Path, root: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules that a file imports anywhere."""
    folders = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(folders[: len(folders) - node.level + 1]) if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                if name in modules:
                    yield name
                elif origin in modules:
                    yield origin
