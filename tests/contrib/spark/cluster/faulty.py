"""`format("faulty")`: djqueue's data source with faults injected into tasks and the driver.

Further options:

`accident`: the fault of one task, that of partition 1, once and in the middle of its rows: `raise` an
exception; `exit` its Python process; kill the JVM of its `executor`; `linger` until a copy of the
task is done.
`dies`: the step of the commit, or `stage` in a task, at which the driver's process group `group` is killed.
`marks`: a directory with marks for the tests.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter

from djqueue.contrib.spark.source import DjqueueDataSource
from djqueue.storage.redis.bulkwrites import RedisStaging
from tests.support import eventually

OWN = ("accident", "dies", "group", "marks")
STRUCK = 1
"""The partition."""
STEPS = (
    "before commit",
    "after commit",
    "before begin",
    "after begin",
    "amid publish",
    "before end",
    "after end",
)
"""Of a commit, in which a driver may die."""


class FaultySource(DjqueueDataSource):
    """The data source with faults."""

    def __init__(self, options: Any) -> None:
        given = dict(options)
        self._fault = Fault(**{name: given.pop(name) for name in OWN if name in given})
        super().__init__(given)

    @classmethod
    def name(cls) -> str:
        return "faulty"

    def writer(self, schema: Any, overwrite: bool) -> "Writer":
        return Writer(super().writer(schema, overwrite), self._fault)

    def streamWriter(self, schema: Any, overwrite: bool) -> "StreamWriter":
        return StreamWriter(super().streamWriter(schema, overwrite), self._fault)


@dataclass(frozen=True)
class Fault:
    """The faults to inject."""

    accident: str = ""
    dies: str = ""
    group: str = ""
    marks: str = ""

    def strikes(self) -> bool:
        """Return whether this task gets the fault. A repeated stage counts its attempts from 0 again."""
        return bool(self.accident) and _partition() == STRUCK and self.mark("struck")

    def among(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a task, with the fault in the middle."""
        for number, batch in enumerate(batches):
            if number == 1:
                ACCIDENTS[self.accident](self)
            yield batch

    def in_task(self) -> Any:
        """Inject a fault while a task stages its rows."""
        return self._dying("after stage") if self.dies == "after stage" else nullcontext()

    def in_commit(self) -> Any:
        """Inject a fault while the driver publishes."""
        return self._dying(self.dies) if self.dies in STEPS else nullcontext()

    @contextmanager
    def _dying(self, moment: str) -> Iterator[None]:
        when, step = moment.split()
        step = step if step == "commit" else f"{step}_all"
        plain = getattr(RedisStaging, step)

        def dies(staging: RedisStaging, *args: Any, **kwargs: Any) -> None:
            if when == "after":
                plain(staging, *args, **kwargs)
            elif when == "amid":
                [chunks] = args
                plain(staging, chunks[: len(chunks) // 2])
            self.mark(f"died {moment}")
            os.killpg(int(self.group), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

        with patch.object(RedisStaging, step, dies):
            yield

    def mark(self, word: str) -> bool:
        """Set a mark. Returns False if it was already set."""
        try:
            (Path(self.marks) / word).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def marked(self, word: str) -> bool:
        """Return whether a mark is set."""
        return (Path(self.marks) / word).exists()


def _partition() -> int:
    context = TaskContext.get()
    assert context is not None
    return int(context.partitionId())


def _raise(fault: Fault) -> None:
    raise RuntimeError("an accident")


def _exit(fault: Fault) -> None:
    os._exit(9)


def _kill_executor(fault: Fault) -> None:
    """Return the process id of the executor's JVM, this worker's grandparent."""
    executor = int(_ps(os.getppid(), "ppid"))
    assert "CoarseGrainedExecutorBackend" in _ps(executor, "command")
    os.kill(executor, signal.SIGKILL)


def _ps(process: int, what: str) -> str:
    command = ["ps", "-o", f"{what}=", "-p", str(process)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _linger(fault: Fault) -> None:
    eventually(lambda: fault.marked("copied"), message="a copy of this task is done")
    fault.mark("lingered")


ACCIDENTS: dict[str, Callable[[Fault], None]] = {
    "raise": _raise,
    "exit": _exit,
    "executor": _kill_executor,
    "linger": _linger,
}


class Writer(DataSourceArrowWriter):
    """The writer of one `save()`."""

    def __init__(self, writer: Any, fault: Fault) -> None:
        self._writer = writer
        self._fault = fault

    def write(self, iterator: Any) -> Any:
        if self._fault.strikes():
            return self._writer.write(self._fault.among(iterator))
        with self._fault.in_task():
            message = self._writer.write(iterator)
        if _partition() == STRUCK and self._fault.accident:
            self._fault.mark("copied")
        return message

    def commit(self, messages: Any) -> None:
        with self._fault.in_commit():
            self._writer.commit(messages)

    def abort(self, messages: Any) -> None:
        self._writer.abort(messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """The writer of one micro-batch."""

    def __init__(self, writer: Any, fault: Fault) -> None:
        self._writer = writer
        self._fault = fault

    def write(self, iterator: Any) -> Any:
        with self._fault.in_task():
            return self._writer.write(iterator)

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803
        with self._fault.in_commit():
            self._writer.commit(messages, batchId)

    def abort(self, messages: Any, batchId: int) -> None:  # noqa: N803
        self._writer.abort(messages, batchId)
