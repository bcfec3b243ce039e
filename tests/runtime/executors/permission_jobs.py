"""Jobs with permissions, for tests: a sandboxed template imports this module."""

import os
import socket
import subprocess
import tempfile
from pathlib import Path

from django.db import connection, transaction

from djqueue import Permissions, job
from djqueue.client import get_storage

AT_IMPORT = {}
try:
    os.listdir("/root" if os.getuid() == 0 else "/etc")
    AT_IMPORT["list"] = "allowed"
except OSError as error:
    AT_IMPORT["list"] = type(error).__name__

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
    socket.create_connection((host, port), timeout=5).close()


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
    with socket.create_connection((host, port), timeout=5) as connection:
        return connection.recv(100)


@job(permissions=Permissions(run=True))
def starts_a_program():
    done = subprocess.run(["/bin/echo", "hello"], capture_output=True, text=True, check=True)
    return done.stdout
