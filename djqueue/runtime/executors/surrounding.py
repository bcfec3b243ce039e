"""The project's middleware around a handler."""

from collections.abc import Callable
from typing import Any

from djqueue.middleware import Layers, through
from djqueue.runtime.context import JobContext, run_of
from djqueue.runtime.handlers import Handler
from djqueue.runtime.runs import Run


def surround(handler: Handler, layers: Layers) -> None:
    """Have a handler called through the layers; without any it stays as it is."""
    mine = layers.aexecute if handler.on_loop else layers.execute
    if mine:
        handler.call = _from_run(through(mine, _to_run(handler.call)))


def _to_run(call: Callable[[Run], Any]) -> Callable[[JobContext], Any]:
    def core(job: JobContext) -> Any:
        return call(run_of(job))

    return core


def _from_run(call: Callable[[JobContext], Any]) -> Callable[[Run], Any]:
    def outer(run: Run) -> Any:
        return call(run.context)

    return outer
