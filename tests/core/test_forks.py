"""Objects are reset in forked children, without being kept alive for it."""

import gc
import os
import subprocess
import sys
import weakref

import pytest

from djqueue.core import threads
from djqueue.core.ids import IdSource
from tests.support import PATIENCE


class Counted:
    def __init__(self) -> None:
        self.resets = 0
        threads.after_fork(self.reset)

    def reset(self) -> None:
        self.resets += 1


FORK = """
import os
from tests.core.test_forks import Counted

alive, gone = Counted(), Counted()
del gone
child = os.fork()
if child == 0:
    print(alive.resets, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(alive.resets)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_resets_live_objects():
    said = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=PATIENCE, check=True
    )

    assert said.stdout.split() == ["1", "0"]
    assert said.stderr == ""


def test_fork_registry_keeps_no_object_alive():
    gc.collect()
    before = threads.registered()
    made = [Counted() for _ in range(100)] + [IdSource() for _ in range(100)]
    alive = [weakref.ref(one) for one in made]
    assert threads.registered() == before + 200

    made.clear()
    gc.collect()

    assert [one for one in alive if one() is not None] == []
    assert threads.registered() == before


BUSY = """
import os
import threading
from djqueue.core.threads import fork_lock

lock, begun, inside = fork_lock(), threading.Event(), []

def work():
    with lock:
        inside.append(True)
        begun.set()
        threading.Event().wait(0.2)
        inside.clear()

threading.Thread(target=work).start()
begun.wait()
child = os.fork()
if child == 0:
    print(inside, lock.acquire(blocking=False), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(lock.acquire(blocking=False))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_waits_for_a_thread_that_uses_a_library_with_locks():
    said = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BUSY],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )

    assert said.stdout.split() == ["[]", "True", "True"]


STUCK = """
import os
import threading
import time
from djqueue.core import threads

lock, begun = threads.fork_lock(), threading.Event()

def work():
    with lock:
        begun.set()
        threading.Event().wait(1)

threading.Thread(target=work).start()
begun.wait()
threads.FORK_WAIT = 0.01
if (child := os.fork()) == 0:
    threads.FORK_WAIT, began = 3, time.monotonic()
    if (grandchild := os.fork()) == 0:
        os._exit(0)
    os.waitpid(grandchild, 0)
    print(time.monotonic() - began < 3, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_does_not_wait_for_threads_of_its_parent():
    said = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", STUCK],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )

    assert said.stdout.split() == ["True"]
