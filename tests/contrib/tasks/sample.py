"""Tasks of the tests, defined with whatever backend the settings have when this is imported."""

from typing import Any

from djqueue.contrib.tasks import task

seen: list[Any] = []


@task
def add(one: int, two: int = 0) -> int:
    return one + two


@task
async def add_async(one: int, two: int = 0) -> int:
    return one + two


@task
def fail() -> None:
    raise ValueError("no such order")


@task
async def fail_async() -> None:
    raise ValueError("no such order")


@task
def leave() -> None:
    raise SystemExit(3)


@task
def return_function() -> Any:
    return lambda: True


@task
def return_bytes() -> Any:
    return {"name": b"caf\xc3\xa9", "pair": (1, 2)}


@task(takes_context=True)
def describe(context: Any, *names: str) -> Any:
    result = context.task_result
    return [context.attempt, result.id, result.worker_ids, list(names), str(result.status)]


@task(takes_context=True, max_attempts=3, backoff=0)
def fail_twice(context: Any) -> Any:
    seen.append((context.attempt, [error.exception_class_path for error in context.task_result.errors]))
    if context.attempt < 3:
        raise ValueError(f"attempt {context.attempt}")
    return context.attempt


@task(takes_context=True, max_attempts=2, backoff=0)
async def fail_once_async(context: Any) -> Any:
    if context.attempt < 2:
        raise ValueError("again")
    return len(context.task_result.worker_ids)


@task
def note(value: Any) -> None:
    seen.append(value)
