"""Child processes that write lines and obey lines."""

import os
import queue
import subprocess
import sys
from threading import Thread
from typing import ClassVar, Self

from tests.support import PATIENCE


class Child:
    """A program in a process of its own, which the end of `with` kills."""

    programs: ClassVar[str]
    """The module that runs one of its functions, by name, with arguments."""

    def __init__(self, program: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.programs, program, *map(str, arguments)],
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def line(self) -> str:
        """Return the next line that it writes."""
        line = self._lines.get(timeout=PATIENCE)
        assert line is not None, "the child has ended"
        return line

    def lines_until(self, last: str) -> list[str]:
        """Return the lines before the one that is `last`."""
        lines = []
        while (line := self.line()) != last:
            lines.append(line)
        return lines

    def tell(self, line: str) -> None:
        """Send a line to it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def ask(self, line: str) -> list[str]:
        """Send a line, and return the lines of the answer."""
        self.tell(line)
        return self.lines_until("done")

    def finish(self) -> int:
        """Let it end by itself, and return its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._reader.join()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdout.close()
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.removesuffix("\n"))
        self._lines.put(None)
