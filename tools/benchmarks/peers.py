"""The job queues that djqueue is compared with: how their users install them and start their workers."""

from collections.abc import Callable
from dataclasses import dataclass

from tools.benchmarks.installing import Environment, node_environment, python_environment

SLOTS = (1, 10, 100)
"""How many jobs run at once, in the columns of the table."""


@dataclass(frozen=True, eq=False)
class Peer:
    """A job queue on a kind of storage."""

    name: str
    storage: str
    """Redis, SQLite, PostgreSQL or memory: what it keeps jobs in, which says what it is compared with."""
    program: str
    """The file, in `programs`, that enqueues a backlog of the given size, and says how long it took."""
    install: Callable[[], Environment]
    packages: tuple[str, ...]
    """Whose versions the table shows."""
    work: Callable[[Environment, int], list[str]]
    """The command of a worker that runs so many jobs at once."""
    worker: str
    """What the table says about that command."""
    jobs: dict[int, int]
    """The size of the backlog, by the number of jobs that run at once; those that it lacks are left out."""
    files: tuple[str, ...] = ()
    """Further files of the program."""
    has_pickup: bool = False
    """Whether the program can measure the time from an enqueue to the handler."""

    @property
    def key(self) -> str:
        """Its name on the command line."""
        return f"{self.name.lower()}-{self.storage.lower()}"

    def is_javascript(self) -> bool:
        return self.program.endswith(".mjs")

    def fill(self, environment: Environment, count: int) -> list[str]:
        """Return the command that enqueues a backlog."""
        action = ["fill"] if self.is_javascript() else []
        return [environment.runtime, self.program, *action, str(count)]


def python(name: str, *packages: str) -> Callable[[], Environment]:
    return lambda: python_environment(name, packages)


def program(environment: Environment, name: str) -> str:
    """Return the path of a program of a virtual environment."""
    return str(environment.folder / "bin" / name)


def works(name: str, *arguments: str) -> Callable[[Environment, int], list[str]]:
    """Return how a worker is started by a program of its environment; `{}` is the number of jobs at once."""

    def command(environment: Environment, slots: int) -> list[str]:
        return [program(environment, name), *(one.format(slots) for one in arguments)]

    return command


def javascript(file: str) -> Callable[[Environment, int], list[str]]:
    """Return how a program of ours is run as a worker."""
    return lambda environment, slots: [environment.runtime, file, "work", str(slots)]


def celery(environment: Environment, slots: int) -> list[str]:
    """Prefork is the default; for a hundred at once, users take threads."""
    pool = ["--pool", "threads"] if slots >= 100 else []
    flags = ["--concurrency", str(slots), *pool, "--loglevel", "WARNING"]
    return [program(environment, "celery"), "-A", "celery_app", "worker", *flags]


def rq(environment: Environment, slots: int) -> list[str]:
    many = ["worker-pool", "--num-workers", str(slots)] if slots > 1 else ["worker"]
    return [program(environment, "rq"), *many, "--url", "redis://127.0.0.1:{port}/0", "--quiet"]


PEERS = (
    Peer(
        "BullMQ", "Redis", "bullmq.mjs",
        lambda: node_environment("bullmq", ("bullmq", "ioredis"), (20,)),
        ("bullmq", "node"), javascript("bullmq.mjs"), "`new Worker(…, {concurrency})`",
        {1: 6_000, 10: 15_000, 100: 20_000}, has_pickup=True,
    ),
    Peer(
        "@platformatic/job-queue", "Redis", "platformatic.mjs",
        lambda: node_environment("platformatic", ("@platformatic/job-queue", "iovalkey"), (22, 19)),
        ("@platformatic/job-queue", "node"), javascript("platformatic.mjs"), "`new Queue({concurrency})`",
        {1: 4_000, 10: 10_000, 100: 15_000},
    ),
    Peer(
        "Celery", "Redis", "celery_app.py", python("celery", "celery[redis]"), ("celery",),
        celery, "prefork; threads for 100", {1: 2_000, 10: 3_000, 100: 3_000},
    ),
    Peer(
        "Dramatiq", "Redis", "dramatiq_app.py", python("dramatiq", "dramatiq[redis]"), ("dramatiq",),
        works("dramatiq", "--processes", "1", "--threads", "{}", "dramatiq_app"), "one process, threads",
        {1: 3_000, 10: 4_000, 100: 4_000},
    ),
    Peer(
        "taskiq", "Redis", "taskiq_app.py", python("taskiq", "taskiq", "taskiq-redis"),
        ("taskiq", "taskiq-redis"),
        works("taskiq", "worker", "--workers", "1", "--max-async-tasks", "{}", "taskiq_app:broker"),
        "one process, asyncio, stream", {1: 3_000, 10: 6_000, 100: 6_000},
    ),
    Peer(
        "SAQ", "Redis", "saq_app.py", python("saq", "saq[redis]", "typing_extensions"), ("saq",),
        works("saq", "saq_app.settings"), "asyncio", {1: 1_500, 10: 3_000, 100: 3_000},
    ),
    Peer(
        "huey", "Redis", "huey_app.py", python("huey", "huey", "redis"), ("huey",),
        works("huey_consumer", "huey_app.huey", "--workers", "{}", "--quiet"), "threads",
        {1: 5_000, 10: 5_000, 100: 5_000},
    ),
    Peer(
        "RQ", "Redis", "rq_app.py", python("rq", "rq"), ("rq",),
        rq, "a process per job; a pool of 10", {1: 300, 10: 500},
    ),
    Peer(
        "django-q2", "Redis", "djangoq_app.py", python("django-q2", "django-q2", "redis"), ("django-q2",),
        works("django-admin", "qcluster", "--settings", "djangoq_settings", "--pythonpath", "."),
        "processes, results in SQLite", {1: 1_000, 10: 1_000}, ("djangoq_settings.py",),
    ),
    Peer(
        "@platformatic/job-queue", "memory", "platformatic.mjs",
        lambda: node_environment("platformatic", ("@platformatic/job-queue", "iovalkey"), (22, 19)),
        ("@platformatic/job-queue", "node"), javascript("platformatic.mjs"), "`new Queue({concurrency})`",
        {1: 20_000, 10: 20_000, 100: 20_000},
    ),
    Peer(
        "bunqueue", "SQLite", "bunqueue.mjs",
        lambda: node_environment("bunqueue", ("bunqueue",), None),
        ("bunqueue", "bun"), javascript("bunqueue.mjs"), "embedded, `new Worker(…, {concurrency})`",
        {1: 3_000, 10: 10_000, 100: 20_000},
    ),
    Peer(
        "procrastinate", "PostgreSQL", "procrastinate_app.py",
        python("procrastinate", "procrastinate", "psycopg[binary]"), ("procrastinate",),
        works("procrastinate", "--app", "procrastinate_app.app", "worker", "--concurrency", "{}"), "asyncio",
        {1: 500, 10: 1_000, 100: 1_000},
    ),
)  # fmt: skip
DJQUEUE = {
    "Redis": {1: 8_000, 10: 40_000, 100: 60_000},
    "SQLite": {1: 15_000, 10: 40_000, 100: 50_000},
    "PostgreSQL": {1: 5_000, 10: 20_000, 100: 30_000},
    "memory": {1: 20_000, 10: 20_000, 100: 20_000},
}
"""The backlog of djqueue, on each storage that a peer uses. In memory it is that of the peer, whose array
gets slow from about 50,000 jobs on."""
