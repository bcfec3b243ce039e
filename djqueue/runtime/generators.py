"""Generators as handlers: what they yield is sent at once, and they are closed, whatever ends them."""

from asyncio import CancelledError
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any

from djqueue.client.generating import is_async_generator, is_generator

if TYPE_CHECKING:
    from .runs import Run

__all__ = ["driven", "is_async_generator", "is_generator"]


def driven(call: "Callable[[Run], Any]", *, is_async: bool) -> "Callable[[Run], Any]":
    """What runs a generator to its end, and returns what it returns (None if it is an async one).

    call: makes the generator.
    """

    def drive(run: "Run") -> Any:
        generator: Generator[Any, None, Any] = call(run)
        items = run.reports.emitter.open(run)
        try:
            with closing(generator):
                while True:
                    try:
                        item = next(generator)
                    except StopIteration as end:
                        return end.value
                    items.put(item)
                    if run.stop:
                        raise CancelledError("stopped between two items")
        finally:
            run.items = None

    async def adrive(run: "Run") -> None:
        generator: AsyncGenerator[Any, None] = call(run)
        items = run.reports.emitter.open(run)
        try:
            async with aclosing(generator):
                async for item in generator:
                    await items.aput(item)
        finally:
            run.items = None

    return adrive if is_async else drive
