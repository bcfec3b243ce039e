"""`runworkers --reload`: the workers in a child process, which is restarted when code changes.

This process only watches. Django's own reloader runs what it reloads in a thread, where no signals
arrive, and ends it in the middle of its jobs; here the child drains before its successor starts.
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

from .serving import PARENT_PIPE, SIGNALS

KILL_AFTER = 10.0
"""Seconds that a child has to end once it was told to hurry."""


class ReloadingParent:
    """Keeps one child running with the code as it is now.

    command: what starts the child.
    patience: seconds that a child has to drain.
    write: shows a line to the user.
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
        """Watch until a signal comes, or the child ends well; its exit code."""
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
                    self._write(f"The workers ended with exit code {code}; a change restarts them.")
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
            # Ctrl-C at the terminal comes to this process alone, which passes it on once.
            start_new_session=True,
        )
        os.close(reading)

    def _restart(self, path: Path) -> None:
        self._changed = None
        self._write(f"{path} has changed: the workers are restarted.")
        self._end()
        if not self._signals:
            self._start()

    def _end(self) -> int:
        """Have the child drain, hurry it when its time is over, kill it at last; its exit code."""
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
            self._write("The workers did not end in time and are killed.")
            child.kill()
            child.wait()
        self._close()
        return child.returncode

    def _close(self) -> None:
        self._child = None
        os.close(self._pipe)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals += 1
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def _on_change(self, file_path: Path, **_: Any) -> bool:
        self._changed = file_path
        # True: it has been seen to, and this process is not to be restarted.
        return True


def child_command() -> list[str]:
    """This process's command line, without the reloading."""
    return [*autoreload.get_child_arguments(), "--no-reload"]


def _watch_apps(sender: autoreload.BaseReloader, **_: Any) -> None:
    """Modules that come later, too: this process imports none of them."""
    installed = [Path(path).resolve() for path in (sys.prefix, sys.base_prefix)]
    for app in apps.get_app_configs():
        path = Path(app.path).resolve()
        if not any(path.is_relative_to(prefix) for prefix in installed):
            sender.watch_dir(path, "**/*.py")
