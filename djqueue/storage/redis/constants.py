"""The constants of the Lua scripts, taken from the package's options, states and errors."""

import re
from collections.abc import Mapping

from djqueue.core.errors import JobFailedError, JobTimeoutError, StorageError
from djqueue.core.job import DEAD_LETTER_REASONS
from djqueue.core.options import DAY, DEFAULT_OPTIONS, MAX_INTEGER
from djqueue.core.states import TERMINAL

from .records import CODES, COMPLETED_KINDS, NOT_PLAIN, STATES

Constant = str | int | Mapping[str, str | int]
COMMENT = re.compile(r"--.*")
LINKED_ACTIVE = CODES["LINKED_ACTIVE"].encode()
WORD = re.compile(r"\b[A-Z][A-Z_]+\b(?:\.[A-Z_]+)?")
WORD_OR_STRING = re.compile(rf"'[^'\n]*'|(?<![.:]){WORD.pattern}")


def _path(error: type[Exception]) -> str:
    return f"{error.__module__}.{error.__qualname__}"


CONSTANTS: dict[str, Constant] = {
    **CODES,
    "NAMES": {code.decode(): state.value for code, state in STATES.items() if code != LINKED_ACTIVE},
    "ENDED": {code.decode(): True for code, state in STATES.items() if state in TERMINAL},
    "RESULT_TTL": DEFAULT_OPTIONS.result_ttl or 0,
    # Sorted sets order members by their bytes: the difference puts higher priorities first.
    "PRIORITY_BASE": MAX_INTEGER + 1,
    # Numbers at the front of the list descend from here; those made from the time since 2005 are higher.
    "FRONT": 2**51,
    # The scores of records that are kept forever begin here; no time reaches them.
    "FOREVER": 2**52,
    # Members of sorted sets are parts joined by NUL; AFTER ends a range of them.
    "NUL": r"\0",
    "AFTER": r"\1",
    "GROUP_RULES": "^(.)(%d*)/?(%d*)/?(%d*)/?(%d*)$",
    # Arguments of one command; Lua can unpack about eight thousand.
    "CHUNK": 4_000,
    "MINUTE": 60_000,
    # The same as texts, since the server takes long to convert numbers.
    "MINUTE_TEXT": "60000",
    "RESULT_TTL_TEXT": str(DEFAULT_OPTIONS.result_ttl or 0),
    # Bytes, which a script compares in less time than strings.
    "ACTIVE_BYTE": ord(CODES["ACTIVE"]),
    "NOT_PLAIN_BYTE": ord(NOT_PLAIN),
    "RESULT_BYTE": ord(COMPLETED_KINDS[True]),
    "HOUR": 3_600_000,
    "DAY": DAY,
}
"""The value of each constant, by its name in the scripts."""
GROUPS: dict[str, dict[str, str | int]] = {
    "DEFAULT": {
        "MAX_STALLS": DEFAULT_OPTIONS.max_stalls,
        "ON_DUPLICATE": DEFAULT_OPTIONS.on_duplicate,
        "ON_DEPENDENCY_FAILURE": DEFAULT_OPTIONS.on_dependency_failure,
    },
    "REASONS": {reason.upper(): reason for reason in DEAD_LETTER_REASONS},
    "ERRORS": {
        "JOB_FAILED": _path(JobFailedError),
        "JOB_TIMEOUT": _path(JobTimeoutError),
        "STORAGE": _path(StorageError),
    },
}
"""Constants that scripts write as fields of a table."""


def header(text: str) -> list[str]:
    """Return the Lua lines that define the tables which a script uses."""
    used = set(WORD.findall(COMMENT.sub("", text)))
    tables = {name: value for name, value in CONSTANTS.items() if isinstance(value, Mapping)}
    return [f"local {name} = {_literal(value)}" for name, value in tables.items() if name in used]


def inline(text: str) -> str:
    """Replace the other constants of a script by their values.

    As locals they would take time in the functions that use them, and a script may have only two hundred.
    """
    return WORD_OR_STRING.sub(_inlined, text)


def _inlined(match: re.Match[str]) -> str:
    word = match[0]
    group, _, member = word.partition(".")
    value = GROUPS[group].get(member) if group in GROUPS else CONSTANTS.get(word)
    return word if value is None or isinstance(value, Mapping) else _literal(value)


def _literal(value: str | int | Mapping[str, str | int]) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_literal(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else f"'{value}'"
