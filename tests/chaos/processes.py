"""Start processes of the project, anew or as forks of a process that has imported it, and kill them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any, Protocol, Self

from tests.runtime.project import ROOT

from .attempts import Death

PATIENCE = 60
"""Seconds in which a killed process has to be gone."""


class Process(Protocol):
    """A running process."""

    pid: int

    def kill(self) -> int:
        """Send SIGKILL, wait for the end, and return the exit code."""


class Started:
    """A process that the Python interpreter was started for."""

    def __init__(self, folder: Path, arguments: list[str], log: Path) -> None:
        with log.open("ab") as output:
            self._process = start(folder, arguments, output)
        self.pid = self._process.pid

    def kill(self) -> int:
        """See `Process.kill`."""
        self._process.kill()
        return self._process.wait(PATIENCE)


class Forked:
    """A process that a zygote forked."""

    def __init__(self, zygote: "Zygote", pid: int) -> None:
        self._zygote = zygote
        self.pid = pid

    def kill(self) -> int:
        """See `Process.kill`. Until the zygote has waited for it, the process has its id."""
        os.kill(self.pid, signal.SIGKILL)
        return int(self._zygote.call(wait=self.pid)["status"])


class Zygote:
    """A process of the project that forks others; its end ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with (folder / "zygote.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.zygote"],
                cwd=folder,
                env=environment(folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def start(self, arguments: list[str], log: Path) -> Forked:
        """Fork a process that runs a program with these arguments of `python`."""
        return Forked(self, self.call(start=arguments, log=str(log))["pid"])

    def call(self, **request: Any) -> dict[str, Any]:
        """Send one request and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError((self._folder / "zygote.log").read_text()[-4_000:])
        reply: dict[str, Any] = json.loads(line)
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and its children."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.stdout.close()


class Service:
    """One process of the project, started again whenever it is killed.

    whole: one of so many starts is that of a new interpreter, at random; the others are forks.
    """

    def __init__(
        self, zygote: Zygote, folder: Path, name: str, arguments: list[str], whole: int, random: Random
    ) -> None:
        self.name = name
        self._zygote = zygote
        self._folder = folder
        self._arguments = arguments
        self._whole = whole
        self._random = random
        self.starts = 0
        self.whole_starts = 0
        self.killed: list[Death] = []
        self.ended: list[str] = []
        """Processes that did not live until they were killed."""
        self.start()

    def start(self) -> None:
        """Start the process."""
        self.starts += 1
        # Numbers of one producer's processes do not overlap.
        arguments = [word.replace("START", str(self.starts * 1_000_000)) for word in self._arguments]
        log = self._folder / f"{self.name}.log"
        self._process: Process
        if self._random.randrange(self._whole) == 0:
            self.whole_starts += 1
            self._process = Started(self._folder, arguments, log)
        else:
            self._process = self._zygote.start(arguments, log)

    def kill(self) -> None:
        """Kill the process."""
        before = time.monotonic_ns()
        code = self._process.kill()
        self.killed.append(Death(self._process.pid, before, time.monotonic_ns()))
        if code != -signal.SIGKILL:
            self.ended.append(f"{self.name} (process {self._process.pid}) ended by itself with code {code}")


def start(folder: Path, arguments: list[str], output: Any) -> "subprocess.Popen[bytes]":
    """Start Python in the project."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(folder),
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process of the project."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    return {**os.environ, "DJANGO_SETTINGS_MODULE": "project_settings", "PYTHONPATH": path}
