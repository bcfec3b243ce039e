"""Start the web server and the workers as child processes, and end them cleanly."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

MANAGE = Path(__file__).resolve().parent.parent / "manage.py"
HOST, PORT = "127.0.0.1", 8000
STARTUP_SECONDS = 30
SHUTDOWN_SECONDS = 20
POLL_SECONDS = 0.1
LOG_TAIL_LINES = 20


class ChildError(Exception):
    """A child process did not do its part; the message holds the end of its log."""


class Child:
    """A program in a process group of its own: Ctrl-C reaches the parent alone."""

    def __init__(
        self, name: str, *command: str, log: Path, debug: bool = False, user: str | None = None
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                user=user,
                cwd="/" if user else None,
                env=os.environ | {"PYTHONUNBUFFERED": "1", "DJANGO_DEBUG": str(int(debug))},
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def expect_running(self) -> None:
        if not self.running:
            raise self.error(f"ended with exit code {self.process.returncode}")

    def expect_success(self) -> None:
        if self.process.wait() != 0:
            raise self.error(f"ended with exit code {self.process.returncode}")

    def error(self, what: str) -> ChildError:
        tail = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return ChildError("\n".join([f"The {self.name} {what}. Last lines of {self.log}:", *tail]))

    def terminate(self) -> None:
        if self.running:
            os.killpg(self.process.pid, signal.SIGTERM)

    def wait(self, deadline: float) -> None:
        """Wait for the end; kill the child at the deadline, or at a second Ctrl-C."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            if self.running:
                print(f"The {self.name} did not end in time and is killed.", file=sys.stderr)
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Children:
    """The children of one run; leaving the block ends those that still run, all at once."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children:
            child.terminate()
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        for child in self._children:
            child.wait(deadline)

    def start(self, name: str, *arguments: str, debug: bool = False) -> Child:
        """Start a management command."""
        return self.run(name, sys.executable, str(MANAGE), *arguments, debug=debug)

    def run(self, name: str, *command: str, debug: bool = False, user: str | None = None) -> Child:
        """Start any program, as another user if one is given."""
        log = self._logs / f"{name.replace(' ', '-')}.log"
        child = Child(name, *command, log=log, debug=debug, user=user)
        self._children.append(child)
        return child

    def stop(self, name: str) -> None:
        """End the children with a name, and forget them."""
        ended = [child for child in self._children if child.name == name]
        for child in ended:
            child.terminate()
        for child in ended:
            child.wait(time.monotonic() + SHUTDOWN_SECONDS)
            self._children.remove(child)

    def expect_running(self) -> None:
        for child in self._children:
            child.expect_running()


def free_port(preferred: int = 0) -> int:
    """The preferred port if nothing listens there, else any free one."""
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((HOST, preferred))
        except OSError:
            candidate.bind((HOST, 0))
        return candidate.getsockname()[1]


def wait_for_page(url: str, server: Child) -> str:
    """The page's HTML as soon as the server answers."""
    deadline = time.monotonic() + STARTUP_SECONDS
    direct = build_opener(ProxyHandler({}))
    while True:
        server.expect_running()
        try:
            with direct.open(url, timeout=STARTUP_SECONDS) as response:
                return response.read().decode()
        except HTTPError as error:
            with error:
                raise server.error(f"answers {url} with status {error.code}") from error
        except URLError as error:
            if time.monotonic() > deadline:
                raise server.error(f"does not answer at {url} ({error.reason})") from error
        time.sleep(POLL_SECONDS)
