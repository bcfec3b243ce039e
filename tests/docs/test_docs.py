"""The documentation matches the package: its examples run, and its tables are complete."""

import ast
import importlib
import inspect
import re
import shlex
import subprocess
import sys
import tomllib
import types
import unittest
from collections.abc import Awaitable
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import uvicorn
from asgiref.sync import async_to_sync
from django.core.checks import Error
from django.core.management import load_command_class
from django.core.management.base import BaseCommand, DjangoHelpFormatter
from django.test import RequestFactory, override_settings
from django.utils.module_loading import import_string
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

import djqueue
from djqueue import Backoff, Queue, Worker, checks, conf, signals
from djqueue import errors as public_errors
from djqueue.client import registry
from djqueue.client.declarations import declared
from djqueue.conf import BackupSettings, readers
from djqueue.contrib.metrics.collector import DEFINITIONS
from djqueue.contrib.spark.options import BATCH, READ_OPTIONS, STREAM, WRITE_OPTIONS
from djqueue.contrib.spark.pipeline.commands import parser as spark_parser
from djqueue.contrib.spark.tables import TABLES
from djqueue.contrib.tasks import backend as task_backend
from djqueue.core import errors
from djqueue.core.executors import EXECUTORS, JobLimits
from djqueue.core.job import DEAD_LETTER_REASONS
from djqueue.core.options import PARSERS, EnqueueOptions, parse_options
from djqueue.core.permissions import Permissions
from djqueue.core.policies import DeadLetterPolicy, QueuePolicy
from djqueue.core.states import TRANSITIONS, State
from djqueue.operations.healthchecks import CHECKS, STORAGE
from djqueue.schedules import SCHEDULE_PARSERS, Schedule, parse_schedule
from djqueue.storage.base import Storage
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.redis import health, scripts
from djqueue.storage.redis.keys import GONE, ITEMS, LOG_LINES, RESULT
from djqueue.storage.redis.location import READ_HERE
from djqueue.storage.redis.options import RedisOptions
from djqueue.storage.scheduler import SchedulerStorage
from djqueue.testing.draining import drain
from djqueue.testing.environment import job_environment
from tests.support import PATIENCE

from .pages import (
    DOCS,
    FENCE,
    PAGES,
    ROOT,
    Block,
    anchors,
    blocks,
    check_management_command,
    first_cells,
    table,
)

MEMORY = {"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}}
DATABASE: dict[str, object] = {}
TRANSACTIONAL = "jobs.md"
"""The page whose examples need a database."""
SPARK = "spark-reference.md"

PYTHON = [block for page in PAGES for block in blocks(page, "python")]
SETTINGS = [block for block in PYTHON if block.heading == "settings.py"]
FOREIGN = [block for page in PAGES for block in blocks(page, "py")]
"""Code of other libraries, which is only compiled."""
CONSOLE = [block for page in PAGES for block in blocks(page, "console")]
RUNNING = [page for page in PAGES if blocks(page, "python")]


# Examples.


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.name)
def test_examples_of_a_page_run(page, monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "_types", {})
    monkeypatch.setattr(declared, "_entries", {})
    monkeypatch.chdir(tmp_path)
    shop = stub_of_a_shop(monkeypatch)
    tasks = {"default": {"BACKEND": "djqueue.contrib.tasks.DjqueueBackend", "QUEUES": []}}
    with override_settings(DJQUEUE=DATABASE if page.name == TRANSACTIONAL else MEMORY, TASKS=tasks):
        for block in blocks(page, "python"):
            if block.heading != "settings.py":
                run(block, shop)
        for function in [vars(shop)[name] for name in vars(shop) if name.startswith("test_")]:
            run_test(function)
        for case in [value for value in vars(shop).values() if is_test_case(value, shop)]:
            run_case(case)


def run_test(function) -> None:
    """Call a test function of an example with the fixtures that it names."""
    names = set(inspect.signature(function).parameters)
    immediate, clock = "djqueue_immediate" in names, "djqueue_clock" in names
    with job_environment(immediate=immediate, clock=clock) as environment:
        fixtures = {
            "djqueue_drain": lambda: drain,
            "djqueue_memory": lambda: environment.storage,
            "djqueue_immediate": lambda: environment.immediate,
            "djqueue_clock": lambda: environment.clock,
            "rf": RequestFactory,
        }
        function(**{name: fixtures[name]() for name in names})


def is_test_case(value: object, module: types.ModuleType) -> bool:
    """Whether a value is a test case that the module defines."""
    return (
        isinstance(value, type)
        and issubclass(value, unittest.TestCase)
        and value.__module__ == module.__name__
    )


def run_case(case: type[unittest.TestCase]) -> None:
    """Run the tests of a test case of an example."""
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert result.testsRun
    assert [text for _, text in result.errors + result.failures] == []


def test_code_for_other_libraries_compiles(subtests):
    for block in FOREIGN:
        with subtests.test(str(block)):
            assert compile(block.text, str(block), "exec")


def test_settings_in_examples_pass_the_checks(subtests):
    for block in SETTINGS:
        with subtests.test(str(block)):
            check_settings_block(block)


def check_settings_block(block: Block) -> None:
    given = {"BASE_DIR": Path()}
    exec(compile(block.text, str(block), "exec"), given)
    assert given.keys() & {"INSTALLED_APPS", "DATABASES", "DJQUEUE"}
    if "DJQUEUE" in given:
        with override_settings(**{name: given[name] for name in ("CACHES", "DJQUEUE") if name in given}):
            assert [found for found in checks.check_settings() if isinstance(found, Error)] == []
    if "DATABASES" in given:
        assert given["DATABASES"]["default"]["ENGINE"].startswith("django.db.backends.")


def stub_of_a_shop(monkeypatch) -> types.ModuleType:
    """The app that the examples are about: its jobs are the page's, its models are anything."""
    shop = types.ModuleType("shop.jobs")
    models = types.ModuleType("shop.models")
    models.__getattr__ = lambda name: MagicMock(name=name)  # type: ignore[method-assign]
    modules = {
        "shop": types.ModuleType("shop"),
        "shop.jobs": shop,
        "shop.tasks": shop,
        "shop.models": models,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return shop


def run(block: Block, module: types.ModuleType) -> None:
    """Run a block's statements, one by one, beside a worker that knows the jobs of the page so far."""
    # Ten seconds are enough for a reader, not for a busy machine.
    text = re.sub(r"\b(wait=|\.wait\()10\b", rf"\g<1>{PATIENCE}", block.text)
    tree = ast.parse("\n" * (block.line - 1) + text, str(block.page))
    for statement in tree.body:
        code = compile(ast.Module([statement], []), str(block.page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with worker() if registry.names() and waits(statement) else nullcontext():
            awaited = eval(code, vars(module))
            if code.co_flags & inspect.CO_COROUTINE:
                # What it asks of the database is asked on this thread, whose connection is closed.
                async_to_sync(finish)(awaited)


async def finish(awaited: Awaitable[object]) -> None:
    await awaited


def waits(statement: ast.stmt) -> bool:
    """Whether a statement needs jobs to be run while it is."""
    text = ast.unparse(statement)
    return ("_and_wait" in text or "result.wait(" in text) and not isinstance(statement, ast.With)


def worker() -> Worker:
    """A worker of the functions under @job."""
    return Worker(concurrency=2)


# Commands.


def test_documented_commands_exist(subtests):
    for block in CONSOLE:
        lines = [line for line in block.text.splitlines() if line.strip()]
        assert lines, str(block)
        for line in lines:
            with subtests.test(f"{block}: {line}"):
                assert line.startswith("$ ")
                check_command(shlex.split(line.removeprefix("$ "), comments=True))


def check_command(words: list[str]) -> None:
    if words[:2] == ["python", "manage.py"]:
        check_management_command(words[2:])
    elif words[:3] == ["python", "-m", "djqueue.contrib.spark"]:
        spark_parser().parse_args(words[3:])
    elif words[:3] == ["python", "-m", "djqueue.contrib.metrics"]:
        assert words[3] == ">"
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
        assert all(word.startswith("ARGS=") for word in words[2:])
    elif words[:3] == ["python", "-m", "tools.benchmarks"]:
        source = (ROOT / "tools" / "benchmarks" / "__main__.py").read_text()
        for flag in (word for word in words[3:] if word.startswith("--")):
            assert f'"{flag}"' in source
    elif words[0] == "uvicorn":
        uvicorn.main.make_context("uvicorn", words[1:])
    else:
        assert words[0] in {"pip", "docker", "sqlite3"}, words


# Tables.


def test_table_of_prometheus_metrics_is_complete():
    kinds = {CounterMetricFamily: "counter", GaugeMetricFamily: "gauge", HistogramMetricFamily: "histogram"}
    rows = {row[0].removesuffix("_total"): (row[1], row[2]) for row in table("metrics.md", "metrics")}

    assert rows == {name: (kinds[one.kind], "`, `".join(one.labels)) for name, one in DEFINITIONS.items()}


def test_table_of_monitoring_settings_is_complete():
    keys = {field.name.upper() for field in fields(conf.MonitoringSettings)}

    assert {*first_cells("metrics.md", "monitoring")} == keys


def test_table_of_signals_is_complete():
    assert first_cells("signals.md", "signals") == list(signals.ALL)


def test_table_of_job_options_is_complete():
    rows = table("jobs.md", "options")

    assert [row[0] for row in rows] == list(PARSERS)
    for name, _, default, *_ in rows:
        if name != "queue":
            given = {name: eval(default, {"Backoff": Backoff})}
            assert parse_options(given, EnqueueOptions()) == EnqueueOptions(), name


def test_table_of_settings_is_complete():
    rows = table("settings.md", "settings")

    assert [row[0] for row in rows] == list(conf.READERS)
    for key, _, default, _ in rows:
        assert vars(conf.read_settings({key: eval(default)})) == vars(conf.Settings()), key


def test_tables_of_health_checks_are_complete():
    rows = table("health.md", "health")

    assert first_cells("health.md", "checks") == [STORAGE, *CHECKS]
    assert {row[0] for row in rows} == known_keys("HEALTH", {"?": 1})
    given = {key: eval(default) for key, _, default, _ in rows}
    assert conf.read_settings({"HEALTH": given}).health == conf.HealthSettings()


def test_tables_of_queue_policies_are_complete():
    policies, letters = table("settings.md", "policies"), table("settings.md", "dead letters")

    assert {row[0] for row in policies} == known_keys("QUEUES", {"q": {"?": 1}})
    assert {row[0] for row in letters} == known_keys("QUEUES", {"q": {"DEAD_LETTERS": {"?": 1}}})
    bounds = [(row[0].strip("`"), row[1].strip("`"), row[3]) for row in table("settings.md", "retention")]
    assert {of for of, _, _ in bounds} == known_keys("QUEUES", {"q": {"RETENTION": {"?": {}}}})
    for of, kind in readers.BOUNDS.items():
        assert {key.lower() for each, key, _ in bounds if each == of} == kind.__dataclass_fields__.keys()
        kept = {key: eval(default) for each, key, default in bounds if each == of}
        assert conf.read_settings({"QUEUES": {"q": {"RETENTION": {of: kept}}}}).policy("q") == QueuePolicy()
    given = {row[0]: eval(row[2]) for row in policies}
    given["DEAD_LETTERS"] = {row[0]: eval(row[2]) for row in letters}
    assert conf.read_settings({"QUEUES": {"q": given}}).policy("q") == QueuePolicy()
    assert {key.lower() for key in given} == QueuePolicy.__dataclass_fields__.keys()
    assert {key.lower() for key in given["DEAD_LETTERS"]} == DeadLetterPolicy.__dataclass_fields__.keys()


def test_table_of_backup_settings_is_complete():
    rows = table("backups.md", "backup")

    assert {row[0] for row in rows} == known_keys("BACKUP", {"?": 1})
    given = {row[0]: SIX_HOURS_AND_ONE.get(row[2]) or eval(row[2]) for row in rows}
    read = conf.read_settings({"BACKUP": given}).backup
    assert replace(read, is_every_given=False) == BackupSettings()


SIX_HOURS_AND_ONE = {"six hours": 21_600, "one hour": 3_600}


def known_keys(setting: str, value: object) -> set[str]:
    """The keys of a dict inside a setting, as far as it takes them: found by asking for each."""
    [problem] = conf.problems({setting: value})
    assert "unknown key '?'" in problem
    words = set(re.findall(r'"([A-Z_]+)"', inspect.getsource(readers)))
    return {
        word
        for word in words
        if not re.search("unknown key|is not a key", str(conf.problems(renamed(setting, value, word))))
    }


def renamed(setting: str, value: object, word: str) -> dict[str, object]:
    text = repr(value).replace("'?'", repr(word))
    return {setting: ast.literal_eval(text)}


def test_table_of_system_checks_is_complete():
    source = "".join(map(inspect.getsource, (checks, health, task_backend)))
    defined = set(re.findall(r'"(djqueue\.[EIW]\d+)"', source))

    assert first_cells("settings.md", "checks") == sorted(defined)


def test_errors_page_has_the_whole_tree():
    page = (ROOT / "docs" / "errors.md").read_text()
    drawn = page.split("```text\n", 1)[1].split("```", 1)[0]

    assert drawn.splitlines() == list(tree(errors.DjqueueError))
    classes = {error.__name__: error.code for error in public(errors.DjqueueError)}
    assert {row[0]: row[1] for row in table("errors.md", "errors")} == classes
    assert {*public_errors.__all__} == classes.keys() | {"JobInterrupted"}
    assert all(getattr(public_errors, name) is getattr(errors, name) for name in public_errors.__all__)


def test_table_of_public_names_is_complete():
    """Other tests compare the tables of errors, queue methods, events, signals and subcommands."""
    assert sorted(first_cells("index.md", "names")) == djqueue.__all__
    assert all(hasattr(djqueue, name) for name in djqueue.__all__)
    for name in {*public_errors.__all__} - {*djqueue.__all__}:
        with pytest.raises(AttributeError, match=rf"Use djqueue\.errors\.{name}$"):
            getattr(djqueue, name)


def public(error: type) -> list[type]:
    """The class and those below it, without the private ones, in order."""
    below = [leaf for branch in children(error) for leaf in public(branch)]
    return [error, *below]


def children(error: type) -> list[type]:
    found: list[type] = []
    for branch in error.__subclasses__():
        if branch.__module__ != errors.__name__:
            continue
        found += children(branch) if branch.__name__.startswith("_") else [branch]
    return sorted(found, key=lambda branch: inspect.getsourcelines(branch)[1])


def tree(error: type, lead: str = "", below: str = "") -> list[str]:
    builtin = next((base for base in error.__bases__ if base.__module__ == "builtins"), None)
    shown = "" if builtin in (None, Exception) else f" ({builtin.__name__})"
    lines = [f"{lead}{error.__name__}{shown}"]
    branches = children(error)
    for branch in branches:
        last = branch is branches[-1]
        lines += tree(branch, below + ("└── " if last else "├── "), below + ("    " if last else "│   "))
    return lines


def test_table_of_runworkers_flags_matches_the_parser():
    command = load_command_class("djqueue", "runworkers")
    parser = command.create_parser("manage.py", "runworkers", formatter_class=DjangoHelpFormatter)
    common = BaseCommand().create_parser("manage.py", "any")
    djangos = {flag for action in common._actions for flag in action.option_strings}
    flags = {flag for action in parser._actions for flag in action.option_strings} - djangos

    cells = first_cells("workers.md", "runworkers")
    assert set(re.findall(r"--[a-z-]+", " ".join(cells))) == flags


def test_table_of_worker_arguments_is_complete():
    arguments = inspect.signature(Worker).parameters.keys() - {"clock", "random"}

    assert set(first_cells("workers.md", "worker")) == arguments


def test_table_of_queue_methods_is_complete():
    documented = {row[0].partition("(")[0] for row in table("queues.md", "queue methods")}
    methods = {name for name in dir(Queue) if not name.startswith("_")}
    methods = {name for name in methods if callable(getattr(Queue, name))}

    twins = {f"a{name}" for name in documented - {"node"}}
    assert documented | twins == methods
    for row in table("queues.md", "queue methods"):
        name, _, written = row[0].partition("(")
        accepted = list(inspect.signature(getattr(Queue, name)).parameters.values())[1:]
        # `*more` is there for the error that it raises.
        parameters = [one.name for one in accepted if one.kind is not one.VAR_POSITIONAL]
        assert re.findall(r"\b([a-z_]+)\b(?=[,=)])(?!\")", f"{written}") == parameters, name


def test_tables_of_events_and_reasons_are_complete():
    from djqueue.client.queue import EVENTS

    assert first_cells("queues.md", "events") == list(EVENTS)
    assert first_cells("queues.md", "reasons") == list(DEAD_LETTER_REASONS)


def test_tables_of_executors_limits_and_permissions_are_complete():
    assert first_cells("executors.md", "executors") == list(EXECUTORS)
    assert first_cells("executors.md", "limits") == [field.name for field in fields(JobLimits)]
    assert first_cells("executors.md", "permissions") == [field.name for field in fields(Permissions)]


def test_table_of_database_storage_options_is_complete():
    known = inspect.signature(DatabaseStorage).parameters.keys() - {
        "policies",
        "limiters",
        "clock",
        "metrics",
        "random",
    }

    assert {row[0].lower() for row in table("storages.md", "database options")} == known


def test_table_of_scheduler_storage_options_is_complete():
    given = {"policies", "limiters", "clock", "metrics", "random"}
    known = inspect.signature(SchedulerStorage).parameters.keys() - given

    assert {row[0].lower() for row in table("storages.md", "scheduler options")} == known


def test_table_of_redis_storage_options_is_complete():
    known = {*READ_HERE, *(name.upper() for name in RedisOptions.__dataclass_fields__)}

    assert set(first_cells("redis.md", "redis options")) == known


def test_tables_of_spark_columns_are_complete():
    documented = {
        name: [(column, kind) for column, kind, _ in table(SPARK, f"spark {name}")] for name in TABLES
    }

    assert documented == {
        name: [(column.name, column.type) for column in one.columns] for name, one in TABLES.items()
    }


def test_table_of_spark_write_options_is_complete():
    said = {name for cell in first_cells(SPARK, "spark write options") for name in words(cell)}
    own = {option.name for option in WRITE_OPTIONS if not option.group}

    assert said == {*own, "idColumn"}


def test_tables_of_spark_read_and_stream_options_are_complete():
    said = {
        kind: {name for cell in first_cells(SPARK, f"spark {kind} options") for name in words(cell)}
        for kind in ("read", "stream")
    }

    assert said["read"] == {option.name for option in READ_OPTIONS if option.uses & BATCH}
    assert said["stream"] == {option.name for option in READ_OPTIONS if option.uses & STREAM}


def words(cell):
    return set(re.findall(r"\w+", cell)) - {"or"}


def test_table_of_redis_keys_has_the_keys_of_every_script():
    cells = [*first_cells("redis.md", "redis keys"), *first_cells("redis.md", "limiter keys")]
    named = {cell.partition(":")[0] for cell in cells}
    declared = {key for name in scripts.NAMES for key in scripts.script(name).keys}
    common = {"workers", "heartbeats", "commands", "dumps", "dump_times", "bulk_writes", "open_writes"}

    assert declared - common <= named
    assert named <= declared | {RESULT, LOG_LINES, ITEMS, GONE}


def test_states_page_matches_the_transition_table(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    import drawing

    page = (ROOT / "docs" / "states.md").read_text()
    content = page.split("```{state-table}\n", 1)[1].split("```", 1)[0]
    words = drawing.read_words(content.splitlines())

    assert words.keys() == {row.name for row in TRANSITIONS}
    assert all(words.values())
    drawn = {
        (row.name, State(source), State(target), row.event)
        for row in drawing.table_rows(words)
        for source in row.sources.split(", ")
        for target in row.targets.split(", ")
    }
    assert drawn == {
        (row.name, row.source, target, row.event) for row in TRANSITIONS for target in row.targets
    }
    assert sum(len(names) for names in drawing.edges().values()) == drawing.diagram().count('class="name"')


def test_storages_in_the_readme_exist():
    named = set(re.findall(r"djqueue\.storage\.[a-z.]+\.\w+Storage", (ROOT / "README.md").read_text()))

    assert len(named) == 4
    assert all(issubclass(import_string(name), Storage) for name in named)


def test_files_and_folders_named_in_the_docs_exist():
    path = re.compile(r"`((?:tests|djqueue|demo_project|docs|scripts|templates|static)/[\w/.-]*)`")
    named = {(page.name, name) for page in PAGES for name in path.findall(page.read_text())}

    assert sorted((page, name) for page, name in named if not (ROOT / name).exists()) == []


def test_every_page_is_in_a_table_of_contents():
    trees = re.findall(
        r"^```\{toctree\}\n(.*?)^```$", "\n".join(map(Path.read_text, DOCS)), re.MULTILINE | re.DOTALL
    )
    listed = {line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")}

    assert listed == {page.stem for page in DOCS} - {"index"}


def test_links_between_pages_lead_to_pages_and_headings(subtests):
    for page in DOCS:
        text = FENCE.sub("", page.read_text())
        for target, anchor in re.findall(r"\]\(([\w-]+\.md|)#?([\w-]*)\)", text):
            with subtests.test(f"{page.name}: {target}#{anchor}"):
                assert not anchor or anchor in anchors(page.with_name(target or page.name))


def test_terms_of_the_glossary_are_sorted():
    text = (ROOT / "docs" / "glossary.md").read_text()
    terms = re.findall(r"\n(\w[\w ]*)\n  ", text)

    assert len(terms) > 30
    assert terms == sorted(terms)


def test_symptoms_have_a_cause_and_a_remedy(subtests):
    text = (ROOT / "docs" / "symptoms.md").read_text()
    for symptom in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        with subtests.test(symptom.splitlines()[0]):
            parts = re.findall(r"^\*\*(.*?)\.\*\*", symptom, re.MULTILINE)
            assert [part for part in parts if part != "How to see it"] == ["Cause", "Remedy"]


def test_public_interfaces_exist():
    cells = " ".join(first_cells("versioning.md", "public"))
    names = set(re.findall(r"djqueue(?:\.\w+)+", cells))

    assert len(names) > 15
    for name in sorted(names):
        assert exists(name), name


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or a name in one."""
    module, _, last = name.rpartition(".")
    try:
        return bool(importlib.import_module(name))
    except ModuleNotFoundError:
        return exists(module) if last == "reads" else hasattr(importlib.import_module(module), last)


def test_supported_versions_are_those_of_the_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = {row[0]: row[1] for row in table("versioning.md", "support")}
    named = [one.rpartition(" :: ") for one in project["classifiers"]]

    for kind, prefix in (("Python", "Programming Language :: Python"), ("Django", "Framework :: Django")):
        versions = [last for lead, _, last in named if lead == prefix and re.fullmatch(r"\d+\.\d+", last)]
        assert rows[kind].split(", ") == versions
    extras = project["optional-dependencies"]
    for kind, extra in (("Celery", "celery"), ("PySpark", "spark")):
        [minimum] = re.findall(
            r"^(?:celery|pyspark\[sql\])>=([\d.]+)", "\n".join(extras[extra]), re.MULTILINE
        )
        assert rows[kind] == f"{minimum} and later"


def test_functions_named_in_the_architecture_are_in_their_files():
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = set(re.findall(r"`((?:[a-z]\w*/)+\w+\.(?:py|lua))`", text))
    named = {pair for form in NAME_AND_FILE for pair in re.findall(form, text)}

    assert len(named) > 50
    assert sorted(f for f in files if not (ROOT / f).exists() and not (ROOT / "djqueue" / f).exists()) == []
    assert sorted(f"{n} {f}" for n, f in named if n not in defined_in(ROOT / "djqueue" / f)) == []


NAME_AND_FILE = (r"`([\w.]+)`\s\(`([\w/]+\.py)`\)", r"\(`([\w.]+)`,\s`([\w/]+\.py)`\)")
"""A name with its file: `name` (`file`), or (`name`, `file`) in a sentence about it."""


def defined_in(module: Path) -> set[str]:
    """Return what a module defines; methods with their classes."""
    names: set[str] = set()
    for node in ast.parse(module.read_text()).body:
        match node:
            case ast.ClassDef(name=name, body=body):
                methods = (ast.FunctionDef, ast.AsyncFunctionDef)
                names |= {name, *(f"{name}.{part.name}" for part in body if isinstance(part, methods))}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


# The build.


@pytest.mark.slow
@pytest.mark.thorough  # `make docs` does the same
def test_documentation_builds_without_warnings(tmp_path):
    for package in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(package, reason="the docs extra is not installed")
    options = ["-W", "--keep-going", "-q", "-b", "html", "-d", tmp_path / "trees"]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, ROOT / "docs", tmp_path / "html"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert built.returncode == 0, built.stderr
    assert (tmp_path / "html" / "index.html").exists()


def test_table_of_schedules_is_complete():
    rows = table("schedules.md", "schedules")

    assert [row[0] for row in rows] == list(SCHEDULE_PARSERS)
    given = {row[0]: eval(row[1]) for row in rows}
    assert parse_schedule({**given, "cron": "@daily"}) == Schedule(cron="@daily")
