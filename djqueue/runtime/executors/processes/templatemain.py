"""The program from which the processes of jobs are forked: it has imported the handlers, and opens nothing.

A worker starts it as a new program, so that it inherits no thread, connection or lock of the worker. Forking
it takes a few milliseconds, where starting Python and Django takes hundreds.
"""

import gc
import os
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgpack

from djqueue.conf import has_django
from djqueue.runtime.exits import (
    GROUP_SIGNALS,
    PR_SET_PDEATHSIG,
    SIGKILL,
    STOP,
    end_with,
    ignore,
    leave,
    name_process,
)

from . import kernel

if TYPE_CHECKING:
    from djqueue.runtime.executors.sandbox.apply import Sandbox

FORK, REAP, ORPHANS, DISCARD = 1, 2, 3, 4
"""From the worker: fork a process with these limits, wait for one that has ended, tell which of some were not
forked here, kill one that has not become ready."""
READY, FAILED, STATUS, ORPHANED = 11, 12, 13, 14
"""To the worker: the handlers are imported, they could not be, the status of a process, those processes."""
LARGEST = 256 * 1024
"""Maximum bytes of a message."""
MAX_ERROR = 20_000
"""Maximum characters of an error."""
DENIED_IMPORT = (
    "While modules are imported for jobs with permissions, they can read the modules of the project, and no "
    "other files of it. List those that they need in DJQUEUE['SANDBOX_IMPORTS']."
)
CLOSED_DATABASE = "djqueue.runtime.executors.sandbox.closed_database"
"""Engine of the databases that the permissions of a job do not include."""
UNKNOWN = -1
"""Status of a process that is no child, or has not ended."""
BOOT = (
    "import ctypes, os, signal, sys; "
    f"signal.pthread_sigmask(signal.SIG_BLOCK, {[int(number) for number in GROUP_SIGNALS]}); "
    f"ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {SIGKILL}); "
    "os.getppid() == int(sys.argv[2]) or os._exit(1); "
    "import json, socket; control = socket.socket(fileno=int(sys.argv[1])); "
    "start = json.loads(control.recv(1 << 20)); sys.path[:] = start['path']; sys.argv[:] = start['argv']; "
    "from djqueue.runtime.executors.processes.templatemain import main; main(control, start)"
)
"""The program itself; its arguments are the descriptor of its socket, and its parent's process ID. First, it
ties itself to its parent, because the imports take a while. The worker's import path comes next, so that it
finds this module.
"""


class ForkRequest(NamedTuple):
    """The name and the limits of a new process."""

    name: str
    memory: int | None
    """Bytes of address space."""
    files: int | None
    file_size: int | None
    serial: int
    """Number of the request, by which a process without a known id is named."""
    directory: str = ""
    """Temporary directory of its own; empty for none."""


def main(control: socket.socket, start: dict[str, Any]) -> NoReturn:
    """Import the handlers, and fork processes until the worker ends."""
    kernel.adopt_orphans()
    kernel.most_processes()
    name_process("template")
    # A process that embeds the worker may block or ignore signals.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in GROUP_SIGNALS:
        # They are meant for the worker, which still needs this process until its jobs have ended.
        signal.signal(number, ignore)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    task = "the sandbox could not be applied"
    sandboxed = start["sandbox"] is not None
    try:
        sandbox = _sandboxed(start["sandbox"])
        task = "the handlers could not be imported"
        _import(start["modules"], None if sandbox is None else start["sandbox"]["databases"])
    except BaseException as error:
        if sandboxed and isinstance(error, PermissionError):
            error.add_note(DENIED_IMPORT)
        text = traceback.format_exc()
        _send(control, FAILED, f"{task}:\n{text[-MAX_ERROR:]}")
        leave(1)
    gc.collect()
    gc.freeze()
    _send(control, READY)
    forked: dict[int, int] = {}
    statuses: dict[int, int] = {}
    while (message := _receive(control)) is not None:
        (kind, *values), descriptors = message
        _reap(forked, statuses)
        if kind == FORK:
            request = ForkRequest(*values)
            forked[_fork(control, sandbox, request, *descriptors)] = request.serial
        elif kind == REAP:
            _send(control, STATUS, values[0], statuses.pop(values[0], UNKNOWN))
        elif kind == ORPHANS:
            _send(control, ORPHANED, [pid for pid in values[0] if pid not in forked])
        elif kind == DISCARD:
            _discard(forked, values[0])
    leave(0)


def _sandboxed(plan: dict[str, Any] | None) -> "Sandbox | None":
    """Restrict this process, before it imports any code of the project."""
    if plan is None:
        return None
    from djqueue.core.permissions import Permissions
    from djqueue.runtime.executors.sandbox.apply import Sandbox

    sandbox = Sandbox(
        Permissions.from_mapping(plan["permissions"]),
        plan["values"],
        plan["code_paths"],
        project_paths=plan["project_paths"],
        import_paths=plan["import_paths"],
        unenforced=plan["unenforced"],
    )
    channel = plan["channel"]
    if channel is None:
        sandbox.stage_one()
    else:
        with socket.socket(fileno=channel) as supervisor:
            sandbox.stage_one(supervisor)
    return sandbox


def _import(modules: list[str], databases: list[str] | None) -> None:
    """Import the handlers. databases: Those that may be used; None for all."""
    if has_django():
        import django
        from django.conf import settings

        if databases is not None:
            settings.DATABASES = {
                alias: config if alias in databases else {"ENGINE": CLOSED_DATABASE}
                for alias, config in settings.DATABASES.items()
            }
        django.setup()
    for name in modules:
        import_module(name)
    # Loaded before the fork, and not in every process.
    import_module("djqueue.runtime.executors.processes.child")
    if has_django():
        from django.db import connections

        connections.close_all()


def _fork(
    control: socket.socket, sandbox: "Sandbox | None", request: ForkRequest, link: int, output: int
) -> int:
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        with warnings.catch_warnings():
            # Python warns if other threads exist: imported modules of the project may have started some.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    except OSError as error:
        # The worker sees that the link has ended.
        sys.stderr.write(f"djqueue: no process for a job could be started: {error}\n")
        pid = UNKNOWN
    if pid == 0:
        _be_job_process(control, sandbox, request, parent, link, output)
    os.close(link)
    os.close(output)
    return pid


def _be_job_process(
    control: socket.socket,
    sandbox: "Sandbox | None",
    request: ForkRequest,
    parent: int,
    link: int,
    output: int,
) -> NoReturn:
    code = 1
    try:
        control.close()
        signal.signal(STOP, signal.SIG_DFL)
        if sandbox is None or sandbox.starts_programs:
            parent = kernel.guard(parent, link, output)
        else:
            kernel.adopt_orphans()
        end_with(parent)
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
            os.close(source) if source not in (0, output) else None
        os.close(output)
        name_process(request.name)
        kernel.limit_self(memory=request.memory, files=request.files, file_size=request.file_size)
        from .child import serve

        if request.directory:
            os.environ.update(TMPDIR=request.directory, HOME=request.directory)
            tempfile.tempdir = request.directory
        if sandbox is not None:
            sandbox.stage_two({"job_tmp": request.directory} if request.directory else None)
        serve(socket.socket(fileno=link), sandboxed=sandbox is not None)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


def _discard(forked: dict[int, int], serial: int) -> None:
    """Kill and reap the process of a request."""
    for pid, number in list(forked.items()):
        if number == serial:
            del forked[pid]
            if pid != UNKNOWN:
                # A guard kills what it has forked. No other process handles this signal before its first job.
                kernel.kill(pid, STOP)
                os.waitpid(pid, 0)


def _reap(forked: dict[int, int], statuses: dict[int, int]) -> None:
    """Reap all children that have ended, and keep the statuses of those that were forked here."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            if forked.pop(pid, None) is not None:
                statuses[pid] = status


def _send(control: socket.socket, *message: Any) -> None:
    try:
        control.sendall(msgpack.packb(message, unicode_errors="surrogatepass"))
    except OSError:
        leave(0)  # The worker has ended.


def _receive(control: socket.socket) -> tuple[list[Any], list[int]] | None:
    try:
        data, descriptors, _, _ = socket.recv_fds(control, LARGEST, 2, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return None
    return (msgpack.unpackb(data), descriptors) if data else None
