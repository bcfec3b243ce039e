"""Start processes of the project, anew or as forks of a process that has imported it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any, Self

from tests.runtime.project import ROOT

from . import tree

PATIENCE = 60
"""Seconds in which a killed process has to be gone."""


class Zygote:
    """A process of the project that forks others; its end ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with (folder / "zygote.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.chaos.zygote"],
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

    def start(self, arguments: list[str], log: Path, *, whole: bool = False) -> int:
        """Start a program with these arguments of `python`, and return its process id.

        whole: Start a new interpreter, and do not fork this one.
        """
        return int(self.call(start=arguments, log=str(log), whole=whole)["pid"])

    def wait(self, pid: int, seconds: float = PATIENCE) -> int | None:
        """Wait for the end of a process; return its exit code, or None if it has not ended in time."""
        code: int | None = self.call(wait=pid, seconds=seconds)["status"]
        return code

    def orphans(self) -> list[tree.Member]:
        """Return the processes that run although the one that started them has ended."""
        return [one for pid in self.call(orphans=True)["orphans"] for one in tree.members(pid, "orphan")]

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
    """A process of the project with those below it, started again whenever it has been killed or stopped.

    root: The role of the process itself.
    whole: One of so many starts is a new interpreter.
    """

    def __init__(
        self,
        zygote: Zygote,
        folder: Path,
        name: str,
        root: str,
        arguments: list[str],
        whole: int,
        random: Random,
    ) -> None:
        self.name = name
        self.root = root
        self.zygote = zygote
        self._folder = folder
        self._arguments = arguments
        self._whole = whole
        self._random = random
        self.starts = 0
        self.whole_starts = 0
        self.pid = 0
        self.start()

    def start(self) -> None:
        """Start the process."""
        self.starts += 1
        # Numbers of one producer's processes do not overlap.
        arguments = [word.replace("START", str(self.starts * 1_000_000)) for word in self._arguments]
        whole = self._random.randrange(self._whole) == 0
        self.whole_starts += whole
        self.pid = self.zygote.start(arguments, self._folder / f"{self.name}.log", whole=whole)

    def members(self) -> list[tree.Member]:
        """Return the process and its descendants."""
        return tree.members(self.pid, self.root)


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
    """The environment of a process of the project, whose temporary files are in a folder of their own."""
    (folder / "tmp").mkdir(exist_ok=True)
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "project_settings",
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "TMPDIR": str(folder / "tmp"),
        "DJQUEUE_CHAOS": str(os.getpid()),
    }
