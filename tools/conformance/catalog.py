"""The suites, and the outcomes in which djqueue deviates from them on purpose."""

from dataclasses import dataclass, field

from .outcomes import Deviation, Skip
from .sources import Change

NO_DATABASE_FIXTURES = ("-p", "no:django")
"""The tests of kombu and Celery use the database as a program does."""
BACKENDS = "tools.conformance.suites.django_backends"


@dataclass(frozen=True)
class Suite:
    """A suite of another project."""

    name: str
    title: str
    package: str
    folder: str
    """Folder of the sdist that has the tests."""
    parts: tuple[tuple[str, ...], ...]
    """What each run of pytest selects. Each run has servers of its own."""
    options: tuple[str, ...] = ()
    """Further arguments of pytest."""
    changes: tuple[Change, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    deviations: tuple[Deviation, ...] = ()
    skips: tuple[Skip, ...] = ()


DJANGO = Suite(
    name="django",
    title="tests of tasks",
    package="Django",
    folder="tests/tasks",
    parts=(("tasks",),),
    changes=(
        Change("tasks/*.py", "django.tasks.backends.dummy", BACKENDS),
        Change("tasks/*.py", "django.tasks.backends.immediate", BACKENDS),
        # Django checks that these tests use no app.
        Change("tasks/*.py", "available_apps = []", "available_apps = ['djqueue']"),
    ),
    environment={"CONFORMANCE_STORAGE": "memory"},  # most of Django's tests must not use a database
    deviations=tuple(
        Deviation(f"tasks/{test}", reason)
        for reason, tests in {
            "The test changes the list of results that the dummy backend keeps in memory, and expects that "
            "`refresh` reads it. `DjqueueBackend` reads the storage.": (
                "test_dummy_backend.py::DummyBackendTestCase::test_refresh_result",
                "test_dummy_backend.py::DummyBackendTestCase::test_refresh_result_async",
            ),
            "The immediate backend cannot do this, and the test expects its refusal. `DjqueueBackend` can.": (
                "test_immediate_backend.py::ImmediateBackendTestCase::test_cannot_get_result",
                "test_immediate_backend.py::ImmediateBackendTestCase::test_cannot_pass_run_after",
                "test_immediate_backend.py::ImmediateBackendTestCase::test_cannot_refresh_result",
            ),
            "`KeyboardInterrupt` in a task "
            "[fails the task](django-tasks.md#differences-from-djangos-backends), and the worker continues. "
            "Django's immediate backend raises it in the caller.": (
                "test_immediate_backend.py::ImmediateBackendTestCase::test_throws_keyboard_interrupt",
            ),
        }.items()
        for test in tests
    ),
)

KOMBU = Suite(
    name="kombu",
    title="common tests of transports",
    package="kombu",
    folder="t",
    options=NO_DATABASE_FIXTURES,
    parts=(("{suites}/kombu_transport.py",),),
)

CANVAS = "t/integration/test_canvas.py::"
LARGE = ("test_chord", "test_chain", "test_group")
"""Classes of the longest module, which are run beside each other."""
CELERY = Suite(
    name="celery",
    title="integration tests",
    package="Celery",
    folder="t",
    options=(*NO_DATABASE_FIXTURES, "-p", "celery.contrib.pytest", "-o", "python_classes=test_*"),
    parts=(
        # The first waits for minutes until something has not happened.
        ("-k", "allow_error_cb", f"{CANVAS}test_chord"),
        ("-k", "not allow_error_cb", f"{CANVAS}test_chord"),
        (f"{CANVAS}test_chain",),
        (f"{CANVAS}test_group",),
        (*(f"--deselect={CANVAS}{name}::" for name in LARGE), CANVAS.removesuffix("::")),
        *(
            (f"t/integration/{module}.py",)
            for module in ("test_tasks", "test_inspect", "test_group_chains", "test_worker", "test_beat")
        ),
    ),
    changes=(
        # Times that are too short on a busy machine.
        Change("t/integration/test_tasks.py", "time.sleep(.01)", "time.sleep(2)"),
        Change("t/integration/test_canvas.py", "TIMEOUT if i == 0 else 0", "TIMEOUT if i == 0 else .5"),
        Change("t/integration/test_group_chains.py", "get(timeout=60)", "get(timeout=600)"),
        # The guard is there because of what Celery's other backends cannot do.
        *(
            Change(
                "t/integration/*.py",
                f"conf.result_backend.startswith({old})",
                f"conf.result_backend.startswith({new})",
            )
            for old, new in (
                ("'redis'", "('redis', 'djqueue')"),
                ('"redis"', "('redis', 'djqueue')"),
                ("('redis', 'rpc')", "('redis', 'rpc', 'djqueue')"),
            )
        ),
    ),
    deviations=(
        *(
            Deviation(
                f"t/integration/test_tasks.py::test_task_redis_result_backend::{test}",
                "The test looks for the channel of a result in Redis. `djqueue://` has none there.",
            )
            for test in (
                "test_asyncresult_forget_cancels_subscription",
                "test_asyncresult_get_cancels_subscription",
            )
        ),
        Deviation(
            "t/integration/test_canvas.py::test_chord::test_chord_on_error",
            "The test reads the results of a chord's tasks from a key of Celery's Redis backend.",
        ),
        Deviation(
            "t/integration/test_canvas.py::test_chord::test_error_propagates_from_chord",
            "If a task of a chain fails, Celery does not fail the group at the end of the chain. "
            "Celery expects this failure of its Redis backend, too (issue 6437).",
        ),
        Deviation(
            "t/integration/test_canvas.py::test_chain::"
            "test_chord_header_id_duplicated_on_rabbitmq_msg_duplication",
            "The test expects what RabbitMQ does with a message that is published twice. Celery expects the "
            "failure of its Redis broker.",
        ),
    ),
    skips=(
        Skip("Broken test", "Celery skips the test always."),
        Skip("Randomly fails", "Celery skips the test always."),
        Skip("async_results aren't performed in async way", "Celery expects the test to fail."),
    ),
    environment={"TEST_BROKER": "djqueue://", "TEST_BACKEND": "djqueue://", "WORKER_LOGLEVEL": "INFO"},
)

SUITES = {suite.name: suite for suite in (DJANGO, KOMBU, CELERY)}
