"""Check what callers pass: the arguments of a function, and the ids, names and payloads of a queue.

The errors name the call that the caller may have meant.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any
from uuid import UUID

from djqueue.core.errors import ArgumentsError, OptionError
from djqueue.core.options import PARSERS, check_text
from djqueue.core.suggest import FOREIGN_OPTIONS

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Arguments:
    """The parameters of a function. The signature is read once; a check compares sets of names."""

    __slots__ = ("_named", "_rules", "signature", "takes_any_name")

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature = signature
        parameters = signature.parameters.values()
        self._named = frozenset(p.name for p in parameters if p.kind in NAMED)
        self.takes_any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._rules = [self._rule(count) for count in range(len(parameters) + 1)]
        """Required and optional keyword names, by the number of positional arguments."""

    def check(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ArgumentsError, naming the job, if the function cannot be called with these arguments."""
        if self.accepts(len(args), kwargs.keys()):
            return
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentsError(
                f"{name}{self.signature}: {self._explain(error, kwargs)}.{self._hint(name, kwargs)}"
            ) from None

    def accepts(self, count: int, names: Collection[str]) -> bool:
        """Return whether a call with so many positional arguments and these named ones is surely right.

        If not, `check` decides.
        """
        if count >= len(self._rules) or (rule := self._rules[count]) is None:
            return False
        required, allowed = rule
        return required.issubset(names) and allowed.issuperset(names) if names else not required

    def check_scheduled(self, name: str) -> None:
        """Raise ArgumentsError if the function cannot be called without arguments, as a schedule does."""
        try:
            self.signature.bind()
        except TypeError as error:
            raise ArgumentsError(
                f"{name}{self.signature}: {error}. A schedule in @job passes no arguments: give the "
                "parameter a default, or declare the schedule with .schedule(name, args=[...])."
            ) from None

    def has_parameter(self, name: str) -> bool:
        """Return whether the function has a parameter that can be passed by this name."""
        return name in self._named

    def takes(self, name: str) -> bool:
        """Return whether the function can be called with an argument of this name."""
        return self.takes_any_name or name in self._named

    def _rule(self, count: int) -> tuple[frozenset[str], frozenset[str]] | None:
        """Return the rule for a number of positional arguments; None if only `Signature.bind` can decide."""
        parameters = list(self.signature.parameters.values())
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if count > len(positional):
            return None
        rest = positional[count:] + [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        required = [p for p in rest if p.default is p.empty]
        if any(p.kind is p.POSITIONAL_ONLY for p in required):
            return None
        return frozenset(p.name for p in required), frozenset(p.name for p in rest if p.kind in NAMED)

    def _explain(self, error: TypeError, kwargs: Mapping[str, Any]) -> str:
        """Return the error that names the unexpected arguments, which a missing argument would hide."""
        unknown = [] if self.takes_any_name else [name for name in kwargs if name not in self._named]
        missing = [name for name in unknown if repr(name) not in str(error)]
        return f"{error}; unexpected {', '.join(map(repr, missing))}" if missing else str(error)

    def _hint(self, job_name: str, kwargs: Mapping[str, Any]) -> str:
        if self.takes_any_name:
            return ""
        unknown = [name for name in kwargs if name not in self._named]
        options = [name for name in unknown if name in PARSERS or name in FOREIGN_OPTIONS]
        if not options:
            return ""
        short = job_name.rpartition(".")[2]
        option = FOREIGN_OPTIONS.get(options[0], options[0])
        return f" Job options are given with using(): {short}.using({option}=...).enqueue(...)."


def read_arguments(function: Callable[..., Any]) -> Arguments | None:
    """Return the parameters of a function; None if it has no signature, like some functions in C."""
    try:
        return Arguments(inspect.signature(function))
    except (TypeError, ValueError):
        return None


def split_calls(entries: Sequence[Any], first: int) -> tuple[list[Sequence[Any]], list[dict[str, Any]]]:
    """Return the positional and the named arguments of entries of `enqueue_many`.

    Args:
        first: Position of the first entry, for errors.

    Raises:
        ArgumentsError: An entry is not a pair (args, kwargs).
    """
    if set(map(type, entries)) == {tuple} and set(map(len, entries)) == {2}:
        args, kwargs = map(list, zip(*entries, strict=True))
        if set(map(type, args)) == {tuple} and set(map(type, kwargs)) == {dict}:
            return args, kwargs
    for position, entry in enumerate(entries, first):
        _check_entry(position, entry)
    return [args for args, _ in entries], [kwargs for _, kwargs in entries]


def check_calls(
    arguments: Arguments,
    name: str,
    first: int,
    args: Sequence[Sequence[Any]],
    kwargs: Sequence[Mapping[str, Any]],
) -> None:
    """Check entries of `enqueue_many`, each form of call once.

    Raises:
        ArgumentsError: The function does not accept an entry; the message names its position.
    """
    forms = set(zip(map(len, args), map(tuple, kwargs) if any(kwargs) else repeat(()), strict=False))
    if not all(arguments.accepts(count, names) for count, names in forms):
        for position, (positional, named) in enumerate(zip(args, kwargs, strict=True), first):
            try:
                arguments.check(name, positional, named)
            except ArgumentsError as error:
                raise ArgumentsError(f"enqueue_many: entry {position}: {error}") from None


def _check_entry(position: int, entry: object) -> None:
    """Raise ArgumentsError, which explains the form of an entry of `enqueue_many`, if this is not one."""
    if isinstance(entry, (tuple, list)) and len(entry) == 2:
        args, kwargs = entry
        if isinstance(args, Sequence) and not isinstance(args, (str, bytes)) and isinstance(kwargs, Mapping):
            return
    raise ArgumentsError(
        f"enqueue_many: entry {position} is {_kind_of(entry)}; "
        "expected a pair (args, kwargs) such as ((42,), {}). "
        "For one argument each: job.enqueue_many(((value,), {}) for value in values)."
    )


def _kind_of(entry: object) -> str:
    """Describe a wrong entry by types and lengths only, because its values may be long or secret."""
    kind = type(entry).__name__
    if not isinstance(entry, (tuple, list)):
        return f"of type {kind}"
    types = ", ".join(type(value).__name__ for value in entry[:3])
    return f"a {kind} of {len(entry)} items ({types}{', ...' if len(entry) > 3 else ''})"


def check_id(value: object, label: str = "id") -> str:
    """Return a job's id. Raises OptionError for anything else, which no job could have."""
    if isinstance(value, str):
        return check_text(label, value)
    kind = type(value).__name__
    if isinstance(value, UUID):
        hint = ": pass str(...)"
    elif isinstance(getattr(value, "id", None), str):
        hint = ": pass its .id"
    else:
        hint = ""
    raise OptionError(f"{label}: expected a job's id (a string), got an object of type {kind}{hint}")


def check_ids(values: object) -> list[str]:
    """Return the ids of jobs; one id stands for itself. Raises OptionError."""
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)) or hasattr(values, "id"):
        return [check_id(values, "ids")]
    return [check_id(value, "ids") for value in values]


def check_name(queue: str, value: object) -> str:
    """Return a job's name. Raises OptionError, with the right call for a function."""
    if callable(value):
        raise OptionError(
            f"name: expected the name of a job (a string), got {value!r}. {_call(queue, value)}"
        )
    return check_text("name", value)


def check_payloads(values: object) -> Iterable[Any]:
    """Return the payloads of many jobs. Raises OptionError for one value, which would be taken apart."""
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping)):
        return values
    raise OptionError(
        "payloads: expected a list or another iterable with one payload per job, got an object of type "
        f"{type(values).__name__}; to enqueue one job, use enqueue()"
    )


def refuse_function(queue: str, payloads: Sequence[Any], more: Sequence[Any] = ()) -> None:
    """Raise ArgumentsError for functions as payloads, and for several payloads: those are calls of RQ."""
    function = next((payload for payload in payloads if callable(payload)), None)
    if function is not None:
        raise ArgumentsError(
            f"Queue.enqueue takes a payload, not a function: got {function!r}. {_call(queue, function)}"
        )
    if more:
        raise ArgumentsError(
            f"Queue.enqueue takes one payload, got {1 + len(more)}: put the values into a list or a dict. "
            "To enqueue a @job function, use its own enqueue(...)."
        )


def _call(queue: str, function: Any) -> str:
    name = getattr(function, "__name__", None) or "function"
    call = f"{name}.using(queue={queue!r}).enqueue(...)"
    if isinstance(getattr(function, "name", None), str) and hasattr(function, "using"):
        return f"Use {call}."
    return f"Put @job on the function, then use {call}."
