"""`runworkers --reload`: runs the worker in a child process, and restarts it when code changes.

The parent process only watches files. Django's own reloader runs its target in a thread, where no signals
arrive, and ends it in the middle of its jobs; here the child finishes its jobs before the next one starts.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from django.apps import apps
from django.utils import autoreload

from ..serving import PARENT_PIPE, SIGNALS

KILL_AFTER = 10.0
"""Seconds that a child has to end after a second SIGTERM."""


class ReloadingParent:
    """Keeps one child running with the current code.

    command: Command line of the child.
    patience: Seconds that a child has to finish its jobs.
    write: Shows a line to the user.
    """

    def __init__(self, command: list[str], patience: float, write: Callable[[str], object]) -> None:
        self._command = command
        self._patience = patience
        self._write = write
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._signals = 0
        self._changed: Path | None = None

    def run(self) -> int:
        """Watch until a signal arrives or the child exits with code 0; return its exit code."""
        reloader = autoreload.get_reloader()
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        autoreload.autoreload_started.connect(_watch_apps)
        autoreload.file_changed.connect(self._on_change)
        try:
            autoreload.autoreload_started.send(sender=reloader)
            self._start()
            for _ in reloader.tick():
                if self._signals:
                    return self._end()
                if self._changed is not None:
                    self._restart(self._changed)
                elif self._child is not None and (code := self._child.poll()) is not None:
                    self._close()
                    if code == 0:
                        return 0
                    self._write(f"The worker exited with code {code} and restarts when code changes.")
            return 0
        finally:
            self._end()
            autoreload.file_changed.disconnect(self._on_change)
            autoreload.autoreload_started.disconnect(_watch_apps)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self) -> None:
        reading, self._pipe = os.pipe()
        self._child = subprocess.Popen(
            self._command,
            env={**os.environ, PARENT_PIPE: str(reading)},
            pass_fds=[reading],
            # A separate session, so that only this process receives Ctrl-C, and passes it on once.
            start_new_session=True,
        )
        os.close(reading)

    def _restart(self, path: Path) -> None:
        self._changed = None
        self._write(f"{path} changed; restarting the worker.")
        self._end()
        if not self._signals:
            self._start()

    def _end(self) -> int:
        """Stop the child, hurry it after its time, and kill it if it does not end; return its exit code."""
        child = self._child
        if child is None:
            return 0
        for seconds in (self._patience, KILL_AFTER):
            if child.poll() is None and not self._signals:
                child.terminate()
            try:
                child.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                continue
        else:
            self._write("The worker did not stop in time and was killed.")
            child.kill()
            child.wait()
        self._close()
        # A signal ends a child that has no handlers yet; that is what was asked for.
        return 0 if self._signals and -child.returncode in SIGNALS else child.returncode

    def _close(self) -> None:
        self._child = None
        os.close(self._pipe)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals += 1
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def _on_change(self, file_path: Path, **_: Any) -> bool:
        self._changed = file_path
        # True keeps Django's reloader from restarting this process.
        return True


def child_command() -> list[str]:
    """Return this process's command line with --no-reload."""
    return [*autoreload.get_child_arguments(), "--no-reload"]


def _watch_apps(sender: autoreload.BaseReloader, **_: Any) -> None:
    """Watch all modules of the project's apps, because this process does not import them."""
    installed = [Path(path).resolve() for path in (sys.prefix, sys.base_prefix)]
    for app in apps.get_app_configs():
        path = Path(app.path).resolve()
        if not any(path.is_relative_to(prefix) for prefix in installed):
            sender.watch_dir(path, "**/*.py")
