"""Jobs for the tests of processes: a template imports this module, as it would an app's."""

import _thread
import asyncio
import ctypes
import decimal
import locale
import mmap
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from contextvars import ContextVar
from pathlib import Path

from djqueue import Retry, Snooze, UnrecoverableError, current_job, job
from djqueue.core import procfs
from djqueue.core.errors import JobInterrupted
from djqueue.runtime.executors.processes import frames

HERE = ContextVar("here", default=0)
SEEN: list[object] = []

isolated = job(executor="isolated", check_arguments=False)


@job(executor="isolated")
def add(a, b):
    return a + b


@job(executor="subprocess")
def add_fresh(a, b):
    return a + b


@job(executor="isolated")
async def aadd(a, b):
    await asyncio.sleep(0)
    return a + b


@job(executor="isolated")
def gives_awaitable(a, b):
    async def later():
        return a + b

    return later()


@job(executor="isolated")
def pid():
    return os.getpid()


@job(executor="subprocess")
def fresh_pid():
    return os.getpid()


@job(executor="isolated", limits={"jobs": 2})
def pid_of_two():
    return os.getpid()


@job
def plain_pid():
    return os.getpid()


@job(executor="isolated")
def remembers(number):
    seen = HERE.get()
    HERE.set(number)
    SEEN.append(number)
    return seen, len(SEEN)


@job(executor="isolated")
def describes():
    job = current_job()
    return [job.id, job.queue, job.name, list(job.args), job.attempts, job.deadline is not None]


@job(executor="isolated")
def reports():
    job = current_job()
    job.progress({"half": True})
    job.log("on its way")
    return "done"


@job(executor="isolated")
def prints():
    print("hello from \x1b[31mred\x1b[0m")
    sys.stderr.write("an error line\n")
    os.system("echo from a program")


@job(executor="isolated", limits={"output": 20_000})
def floods():
    for number in range(200_000):
        print(f"line {number}")


@job(executor="isolated")
def reads_children():
    return [child.result for child in current_job().children()]


@job(executor="isolated")
async def areads_children():
    return [child.result for child in await current_job().achildren()]


@job(executor="isolated")
def yields(count):
    yield from range(count)


@job(executor="isolated")
async def ayields(count):
    for number in range(count):
        yield number


@job(executor="isolated")
def yields_for_ever():
    number = 0
    while True:
        yield number
        number += 1


@job(executor="isolated", max_attempts=1)
def raises(text):
    raise ValueError(text)


@job(executor="isolated", max_attempts=2, backoff=0)
def fails_once():
    if current_job().failures == 0:
        raise Retry("once more", delay=0)
    return "worked"


@job(executor="isolated")
def snoozes():
    if current_job().attempts == 1 and not os.environ.get("SNOOZED"):
        os.environ["SNOOZED"] = "1"
        raise Snooze(delay=0)
    return "awake"


@job(executor="isolated", max_attempts=5)
def refuses():
    raise UnrecoverableError("no")


@job(executor="isolated", max_attempts=1)
def returns_what_cannot_be_stored():
    return object()


@job(executor="isolated", max_attempts=1)
def returns_too_much():
    return "x" * 2_000_000


@job(executor="isolated", max_attempts=1)
def exits(code):
    sys.exit(code)


@job(executor="isolated", max_attempts=1)
def leaves_at_once():
    os._exit(0)


@job(executor="isolated", max_attempts=1)
def kills_itself():
    os.kill(os.getpid(), signal.SIGKILL)


@job(executor="isolated", max_attempts=1)
def segfaults():
    ctypes.string_at(0)


@job(executor="isolated", max_attempts=2, backoff=0)
def segfaults_twice():
    ctypes.string_at(0)


@job(executor="isolated", max_attempts=1, limits={"memory": "128 MiB"})
def fills_memory():
    kept = []
    while True:
        kept.append(bytearray(2**20))
        time.sleep(0.001)


@job(executor="isolated", max_attempts=1, limits={"memory": "128 MiB"})
def fills_memory_of_a_program():
    code = "import time; kept = []\nwhile True: kept.append(bytearray(2**20)); time.sleep(0.001)"
    subprocess.run([sys.executable, "-c", code], check=True)


@job(executor="isolated", max_attempts=1, limits={"memory": "128 MiB"})
def fills_shared_memory():
    """Give the pages back one by one, which takes them only from this process."""
    shared = mmap.mmap(-1, 192 * 2**20)
    for start in range(0, len(shared), 2**20):
        shared[start : start + 2**20] = b"x" * 2**20
        shared.madvise(mmap.MADV_DONTNEED)
    time.sleep(60)


@job(executor="isolated", max_attempts=1, limits={"memory": "128 MiB"})
def fills_a_file_in_memory():
    file = os.memfd_create("large")
    for _ in range(192):
        os.write(file, b"x" * 2**20)
    time.sleep(60)


@job(executor="isolated", max_attempts=1, limits={"memory": "128 MiB"})
def fills_memory_without_its_main_thread():
    """Fill it in a program whose first thread has ended, which the kernel shows without any memory."""
    code = (
        "import ctypes, threading, time\n"
        "def fill():\n"
        "    time.sleep(0.3)\n"
        "    kept = b'x' * (192 * 2**20)\n"
        "    time.sleep(60)\n"
        "threading.Thread(target=fill).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@job(executor="isolated", limits={"memory": "128 MiB"})
def shares_mapped_memory():
    """Share a third of the limit between three processes, three times."""
    for _ in range(3):
        with mmap.mmap(-1, 40 * 2**20) as shared:
            shared[:] = b"x" * len(shared)
            pids = [_forked(lambda: shared[:: 2**12] and time.sleep(0.3)) for _ in range(2)]
            for pid in pids:
                os.waitpid(pid, 0)


@job(executor="isolated", max_attempts=1, limits={"processes": 20})
def starts_many(path):
    with Path(path).open("a") as file:
        for _ in range(25):
            print(subprocess.Popen(["sleep", "600"]).pid, file=file, flush=True)
    time.sleep(60)


@job(executor="isolated", max_attempts=1, limits={"processes": 20})
def starts_many_threads(path):
    for _ in range(25):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    time.sleep(60)


@job(executor="isolated")
def leaves_programs_that_end(count):
    """Return how many of them remain in the table of processes."""
    for _ in range(count):
        os.waitpid(_forked(lambda: _forked(int)), 0)
    until = time.monotonic() + 5
    while (left := len(_remaining())) and time.monotonic() < until:
        time.sleep(0.01)
    return left


@job(executor="isolated")
def waits_for_any_program():
    """Return whether the process that has ended is the one that was started here."""
    for _ in range(20):
        os.waitpid(_forked(lambda: _forked(int)), 0)
    expected = _forked(int)
    return os.wait()[0] == expected


def _forked(call):
    """Start a process that calls a function and ends; return its id."""
    pid = os.fork()
    if pid == 0:
        try:
            call()
        finally:
            os._exit(0)
    return pid


def _remaining():
    """Processes of this session but this one."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.getsid(int(name)) == os.getsid(0) and int(name) != os.getpid():
                found.append(name)
        except ProcessLookupError:
            continue
    return found


@job(executor="isolated", max_attempts=1, limits={"memory": "64 MiB"})
def asks_for_much_at_once():
    return len(bytearray(2**36))


@job(executor="isolated", max_attempts=1, limits={"cpu": 1})
def burns():
    while True:
        pass


@job(executor="isolated", max_attempts=1, limits={"files": 64})
def opens_files():
    return [open("/dev/null") for _ in range(100)]


@job(executor="isolated", max_attempts=1, limits={"file_size": 1_000})
def writes_much(path):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    Path(path).write_bytes(b"x" * 10_000)


@job(executor="isolated", max_attempts=1, limits={"grace": 0.2})
def sleeps(seconds):
    time.sleep(seconds)
    return "slept"


@job(executor="isolated", max_attempts=1, limits={"grace": 0.2})
def sleeps_while_no_thread_starts(seconds):
    _thread.start_new_thread = lambda *_: 0
    return sleeps(seconds)


@job(executor="isolated", max_attempts=1, limits={"grace": 0.2})
async def asleeps(seconds):
    await asyncio.sleep(seconds)
    return "slept"


@job(executor="isolated", max_attempts=1, limits={"grace": 60})
def waits_until_cancelled():
    current_job().cancelled.wait(60)
    return "stopped by itself"


@job(executor="isolated", max_attempts=1, limits={"grace": 3})
def cleans_up(path):
    try:
        time.sleep(60)
    except JobInterrupted:
        Path(path).write_text("cleaned")
        raise


@job(executor="isolated", max_attempts=1, limits={"grace": 0.2})
def ignores_everything(path):
    for number in range(1, signal.NSIG):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            continue
    Path(path).write_text(str(os.getpid()))
    while True:
        try:
            time.sleep(60)
        except BaseException:
            continue


@job(executor="isolated", max_attempts=1, limits={"grace": 0.2})
def stops_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


@job(executor="isolated")
def leaves_a_thread():
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return os.getpid()


@job(executor="isolated")
def leaves_a_program(path):
    program = subprocess.Popen(["sleep", "600"])
    Path(path).write_text(str(program.pid))
    return os.getpid()


@job(executor="isolated")
def leaves_a_daemon(path):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(path).write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not Path(path).exists() or not Path(path).read_text():
        time.sleep(0.01)
    return os.getpid()


@job(executor="isolated", max_attempts=1)
def leaves_a_daemon_and_crashes(path):
    leaves_a_daemon.function(path)
    os._exit(3)


def link():
    """The socket to the worker, which a handler should not use."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                return socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
    raise AssertionError("no socket")


@job(executor="isolated", max_attempts=1)
def sends(data):
    link().sendall(data)
    time.sleep(60)


@job(executor="isolated", max_attempts=1)
def answers_twice():
    frame = frames.pack(frames.RESULT, 1, "complete", b"\xc0", 0, None, "")
    link().sendall(frame + frame)
    return "third"


@job(executor="isolated")
def descriptors():
    return sorted(
        os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)
    )


def _is_open(name):
    try:
        os.fstat(int(name))
    except OSError:
        return False
    return True


@job(executor="isolated")
def limits():
    return [resource.getrlimit(number)[0] for number in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE)]


@job(executor="isolated", max_attempts=1)
def kills_the_template():
    os.kill(procfs.parent(os.getppid()), signal.SIGKILL)
    time.sleep(60)


@job(executor="isolated", max_attempts=1)
def leaves_a_daemon_and_kills_the_template(path):
    leaves_a_daemon.function(path)
    kills_the_template.function()


@job(executor="isolated", max_attempts=1)
def chatters(count):
    for number in range(count):
        current_job().log(number)
    return count


@job(executor="isolated", max_attempts=1, limits={"cpu": 1})
def burns_and_ignores():
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    while True:
        pass


@job(executor="isolated", max_attempts=1)
def asks_without_reading(count):
    link().sendall(frames.pack(frames.READ) * count)
    time.sleep(60)


@job(executor="isolated", max_attempts=1, limits={"grace": 3})
async def cleans_up_async(path):
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        try:
            await asyncio.sleep(60)
        finally:
            write(path, "cleaned")


def write(path, text):
    Path(path).write_text(text)


@job(executor="isolated")
def closes_stdout():
    sys.stdout.close()
    return "done"


@job(executor="isolated")
def leaves_timers_and_tasks():
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir("/")
    return [os.getpid()]


@job(executor="isolated")
def changes_its_process():
    """The process that the job finds: folder, umask, warnings filters, locale, precision. It changes them."""
    umask = os.umask(0o077)
    found = [os.getcwd(), umask, len(warnings.filters), locale.setlocale(locale.LC_ALL)]
    precision = decimal.getcontext().prec
    os.chdir("/")
    warnings.simplefilter("error")
    locale.setlocale(locale.LC_ALL, "C.UTF-8" if "C.UTF-8" not in found[3] else "C")
    decimal.getcontext().prec = 3
    return [os.getpid(), *found, precision]


class HostileError(BaseException):
    @property
    def __class__(self):
        raise self


@job(executor="isolated", max_attempts=1)
async def raises_what_cannot_be_looked_at():
    raise HostileError


@job(executor="isolated")
async def leaves_a_task():
    async def later():
        await asyncio.sleep(0.1)
        sys.exit(7)

    SEEN.append(asyncio.ensure_future(later()))
    return os.getpid()


@job(executor="isolated")
async def waits_a_moment():
    await asyncio.sleep(0.3)
    return "fine"


@job(executor="isolated")
def terminates_a_fork():
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    process.terminate()
    process.join(60)
    return process.exitcode


@job(executor="isolated", limits={"memory": "256 MiB"})
def shares_memory():
    kept = bytearray(os.urandom(2**20) * 100)
    pids = []
    for _ in range(2):
        pids.append(os.fork())
        if not pids[-1]:
            time.sleep(0.5)
            os._exit(0)
    for pid in pids:
        os.waitpid(pid, 0)
    return len(kept)


@job(executor="isolated")
def returns_in_a_fork(returns):
    """Fork, and return in both processes: in the child at once."""
    child = os.fork()
    if child == 0:
        if returns:
            return "the child's"
        raise ValueError("the child's")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == os.EX_SOFTWARE
    return "the parent's"
