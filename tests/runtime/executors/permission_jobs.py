"""Jobs with permissions, for tests: a sandboxed template imports this module."""

import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import msgpack
from django.db import connection, transaction

from djqueue import Permissions, Queue, chain, current_job, job
from djqueue.client import get_storage
from djqueue.runtime.executors.processes import frames
from djqueue.runtime.executors.processes.enqueueing import frames_of
from djqueue.signals import job_enqueued

AT_IMPORT = {}
try:
    os.listdir("/root" if os.getuid() == 0 else "/etc")
    AT_IMPORT["list"] = "allowed"
except OSError as error:
    AT_IMPORT["list"] = type(error).__name__
try:
    Path(__file__).parents[3].joinpath("pyproject.toml").read_text()
    AT_IMPORT["project"] = "allowed"
except OSError as error:
    AT_IMPORT["project"] = type(error).__name__

nothing = Permissions()


@job(permissions=nothing)
def add(a, b):
    return a + b


@job(permissions=nothing, executor="subprocess")
async def add_fresh(a, b):
    return a + b


@job(permissions=nothing)
def when_imported():
    return AT_IMPORT


@job(permissions=nothing, max_attempts=1)
def reads(path):
    return Path(path).read_text()


@job(permissions=nothing, max_attempts=1)
def writes(path):
    Path(path).write_text("x")


@job(permissions=nothing, max_attempts=1)
def connects(host, port):
    socket.create_connection((host, port), timeout=60).close()


@job(permissions=nothing, max_attempts=1)
def starts():
    return subprocess.run(["/bin/true"], check=False).returncode


@job(permissions=nothing, max_attempts=1)
def forks():
    return os.fork()


@job(permissions=nothing, max_attempts=1)
def signals(pid):
    os.kill(pid, 0)


@job(permissions=nothing)
def environment():
    return sorted(os.environ)


@job(permissions=Permissions(env=["SHOWN_*"]))
def shown_environment():
    return sorted(name for name in os.environ if name.startswith(("SHOWN", "HIDDEN")))


@job(permissions=nothing, max_attempts=1)
def uses_the_database():
    from djqueue.models import Job

    return Job.objects.count()


@job(permissions=nothing, max_attempts=1)
def uses_a_transaction():
    with transaction.atomic():
        pass


@job(permissions=nothing, max_attempts=1)
def uses_a_cursor():
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


@job(permissions=nothing, max_attempts=1)
async def awaits_the_database():
    from djqueue.models import Job

    return await Job.objects.acount()


@job(permissions=nothing, max_attempts=1)
def uses_the_storage():
    return get_storage().queues.names()


@job(permissions=Permissions(write=["{job_tmp}"]))
def keeps_a_file():
    folder = Path(tempfile.gettempdir())
    before = sorted(path.name for path in folder.iterdir())
    with tempfile.NamedTemporaryFile(delete=False) as file:
        file.write(b"left behind")
    return [str(folder), before]


@job(permissions=Permissions(net=["127.0.0.1:1", "localhost"]), max_attempts=1)
def connects_to_localhost(host, port):
    with socket.create_connection((host, port), timeout=60) as connection:
        return connection.recv(100)


@job(permissions=Permissions(net=["127.0.0.1:1", "localhost"]), max_attempts=1)
def connects_when_told(host, port):
    current_job().cancelled.wait()
    with socket.create_connection((host, port), timeout=60) as connection:
        return connection.recv(100)


@job(permissions=Permissions(run=True))
def starts_a_program():
    done = subprocess.run(["/bin/echo", "hello"], capture_output=True, text=True, check=True)
    return done.stdout


# Enqueueing.

to_mail = job(permissions=Permissions(enqueue=["mail", "small"]), max_attempts=1)

SIGNALS = []


def see_signal(**about):
    SIGNALS.append(about)


@to_mail
def signals_seen():
    job_enqueued.connect(see_signal)
    Queue("mail").enqueue(1)
    return len(SIGNALS)


@job(permissions=nothing, max_attempts=1)
def enqueues_unlisted(queue, value):
    return Queue(queue).enqueue(value).id


@to_mail
def enqueues_when_cancelled():
    current_job().cancelled.wait()
    return Queue("mail").enqueue(1).id


@to_mail
def enqueues(queue, value):
    result = Queue(queue).enqueue(value)
    return [result.id, result.status, result.queue]


@job(permissions=Permissions(enqueue=["mail", "small"]), executor="subprocess", max_attempts=1)
async def enqueues_async(queue, count):
    results = await Queue(queue).aenqueue_many(list(range(count)), priority=3, tags=["one", "two"])
    return len({result.id for result in results})


@job(permissions=Permissions(enqueue=True), max_attempts=1)
def enqueues_anywhere(queue):
    return Queue(queue).enqueue(1).queue


@to_mail
def enqueues_with_every_option():
    Queue("mail", timeout=1.5, ttl=60, backoff={"kind": "linear", "base": 2}, retention=None).enqueue(
        {"a": (1, 2)}, id="one", priority=-4, delay=30, concurrency_key="g", weight=2, lifo=True,
        unique_key="u", unique_ttl=7, on_duplicate="replace", subject="s", max_attempts=9, result_ttl=None,
        durable=False, headers={"a": [None, 1]},
    )  # fmt: skip


@to_mail
def enqueues_many(size, count):
    return len(Queue("mail").enqueue_many([b"x" * size] * count))


@to_mail
def enqueues_a_chain():
    queue = Queue("mail")
    first, second = queue.node(1), queue.node(2)
    results = chain(first, second).enqueue()
    return results.ids


@to_mail
def enqueues_twice():
    queue = Queue("mail")
    return [queue.enqueue(1, id="same").status for _ in range(2)]


@job(queue="mail")
def letter(first, second):
    return first, second


@to_mail
def enqueues_by_its_type():
    return letter.using(delay=60).enqueue(1, 2).queue


@to_mail
def enqueues_another_type():
    return add.using(queue="mail").enqueue(1, 2).queue


@to_mail
def reads_what_it_depends_on():
    [before] = current_job().children()
    return before.result, before._record.payload, list(before._record.logs)


@to_mail
def logs_and_crashes():
    context = current_job()
    for number in range(1_500):
        context.log(number)
    os._exit(0)


@to_mail
def enqueues_after(queue, job_id):
    return Queue("mail").enqueue(1, depends_on=[(queue, job_id)]).id


@to_mail
def enqueues_pickle():
    return Queue("mail", content_type="application/x-python-serialize").enqueue(1).id


@to_mail
def waits_for_a_job():
    return Queue("mail").enqueue_and_wait(1, wait=5)


@to_mail
def reads_its_job():
    return Queue("mail").enqueue(1).refresh().status


@to_mail
def enqueues_without_end():
    while True:
        Queue("small").enqueue(1)


@job(permissions=Permissions(enqueue=["mail"], run=True), max_attempts=1)
def enqueues_from_a_fork():
    pid = os.fork()
    if not pid:
        try:
            Queue("mail").enqueue(1)
        except PermissionError:
            os._exit(7)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@to_mail
def enqueues_and_crashes():
    Queue("mail").enqueue(1, id="before the crash")
    os._exit(3)


@to_mail
def sends_requests(batches, count, result):
    """Send raw requests, as a hostile handler could. A number stands for so many bytes."""
    body = msgpack.packb(batches) if isinstance(batches, list) else batches
    body = b"\xc4\x00" * body if isinstance(body, int) else body
    link().sendall(frames_of(body) * count + result)
    return [link().recv(100_000)]


@to_mail
def sends_frames(data):
    link().sendall(data)
    time.sleep(60)


@to_mail
def asks_raw(batch):
    """Ask for one batch without the checks of the client, and return the code of the answer."""
    batch[3] = [b"x" * data if isinstance(data, int) else data for data in batch[3]]
    link().sendall(frames_of(msgpack.packb([batch])))
    (length,) = frames.LENGTH.unpack(link().recv(4, socket.MSG_WAITALL))
    _, code, text, results = frames.unpack(link().recv(length, socket.MSG_WAITALL))
    return [code, text, len(results)]


def link():
    return next(
        socket.socket(fileno=os.dup(number))
        for number in range(3, 50)
        if (name := _target(number)) and name.startswith("socket:")
    )


def _target(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return None
