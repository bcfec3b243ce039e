"""The two ways to run the demo: staying up for a person, or checking its own counts."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from django.conf import settings
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command

from demo_project.flights.models import Flight

from .business import FIRST_RELEASE, Business
from .children import HOST, Child, ChildError, Children, free_port, wait_for_page
from .history import make_history
from .progress import Progress
from .servers import postgres_in, redis_in
from .tally import differences, table, tally

CONCURRENCY = "8"
PROGRESS_SECONDS = 1.0
ADMIN_NAME = ADMIN_PASSWORD = "admin"


def stay_up(flights: int | None, port: int) -> int:
    """Serve the admin and run the business until Ctrl-C; 1 if something fails before."""
    try:
        with server_of_storage(), Children(Path(settings.VAR_DIR) / "log") as children:
            prepare(flights)
            make_history()
            start_server(children, free_port(port))
            start_workers(children)
            progress = Progress()
            follow_until_done(children, progress)
            print(table(tally(Flight.objects.count())))
            print("All jobs are done. The business goes on until Ctrl-C.", flush=True)
            business = Business(partial(deploy, children))
            business.begin()
            follow_for_ever(children, business.go_on)
    except (ChildError, CommandError) as error:
        print(error, file=sys.stderr)
    return 1


def check(flights: int | None) -> int:
    """Run the whole season once; 0 if its counts add up, 1 if not or if something fails before."""
    started = time.monotonic()
    try:
        with server_of_storage(), Children(Path(settings.VAR_DIR) / "log") as children:
            prepare(flights)
            start_server(children, free_port())
            workers = children.start("workers", "runworkers", "--until-empty", "--concurrency", CONCURRENCY)
            follow_until_ended(workers)
            counts = tally(flights)
    except (ChildError, CommandError) as error:
        print(error, file=sys.stderr)
        return 1
    print(table(counts))
    for difference in differences(counts):
        print(f"The counts do not add up: {difference}", file=sys.stderr)
    print(f"{time.monotonic() - started:.0f} seconds")
    return 1 if differences(counts) else 0


def server_of_storage() -> AbstractContextManager[object]:
    """Start the server that the storage needs, if any."""
    servers = {"postgres": postgres_in, "redis": redis_in}
    start = servers.get(settings.STORAGE)
    return nullcontext() if start is None else start(Path(settings.VAR_DIR), int(settings.PORT))


def prepare(flights: int | None) -> None:
    """Bring about what the first job needs, and the jobs; what is there already stays as it is."""
    prepare_database(flights)
    print("Enqueueing", flush=True)
    call_command("enqueue_claims")


def prepare_database(flights: int | None = None) -> None:
    """The tables, the flights, and one who may see everything."""
    print("Preparing the database", flush=True)
    call_command("migrate", verbosity=0)
    if not User.objects.filter(username=ADMIN_NAME).exists():
        User.objects.create_superuser(ADMIN_NAME, "admin@flights.example", ADMIN_PASSWORD)
    call_command("load_flights", flights=flights)


def start_server(children: Children, port: int) -> None:
    address = f"{HOST}:{port}"
    # Django serves static files and charts in debug mode only; elsewhere the mode costs speed.
    server = children.start("web server", "runserver", "--noreload", address, debug=True)
    login_page = wait_for_page(f"http://{address}/", server)
    if 'name="username"' not in login_page:
        raise server.error("does not show the admin's login page")
    print(
        f"The admin is at http://{address}/admin/ (user {ADMIN_NAME}, password {ADMIN_PASSWORD})",
        flush=True,
    )


def follow_until_done(children: Children, progress: Progress) -> None:
    while not progress.tell().empty:
        children.expect_running()
        time.sleep(PROGRESS_SECONDS)


def follow_for_ever(children: Children, each_second: Callable[[], object]) -> None:
    while True:
        children.expect_running()
        each_second()
        time.sleep(PROGRESS_SECONDS)


def start_workers(children: Children, release: str = FIRST_RELEASE) -> None:
    os.environ["DJQUEUE_DEMO_RELEASE"] = release
    children.start("workers", "runworkers", "--concurrency", CONCURRENCY)


def deploy(children: Children, release: str) -> None:
    """Restart the workers with another release."""
    print(f"Deploying release {release}", flush=True)
    children.stop("workers")
    start_workers(children, release)


def follow_until_ended(workers: Child) -> None:
    progress = Progress()
    while workers.running:
        time.sleep(PROGRESS_SECONDS)
        progress.tell()
    workers.expect_success()
