"""Child processes that say lines and are told lines; see `programs.py` for what they do."""

import os
import queue
import signal
import subprocess
import sys
from threading import Thread
from typing import Self

from tests.support import PATIENCE


class Child:
    """A program in a process of its own. Whatever it is doing, the end of `with` kills it."""

    def __init__(self, program: str, *arguments: object, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "tests.storage.journaled.programs", program]
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def hears(self) -> str:
        """The next line that it says."""
        line = self._lines.get(timeout=PATIENCE)
        assert line is not None, "it has ended without another word"
        return line

    def hears_until(self, word: str) -> list[str]:
        """The lines up to the one that is this word, without it."""
        lines = []
        while (line := self.hears()) != word:
            lines.append(line)
        return lines

    def told(self) -> list[str]:
        """Everything that it has said and that was not heard yet, once it has ended."""
        lines = []
        while (line := self._lines.get(timeout=PATIENCE)) is not None:
            lines.append(line)
        return lines

    def tell(self, line: str) -> None:
        """Say a line to it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def ends(self) -> int:
        """Wait for its end, having said that there is nothing more to say; its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """SIGSTOP: it does nothing, but is there."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

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
