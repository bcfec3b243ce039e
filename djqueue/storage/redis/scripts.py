"""The Lua scripts: a file for each transition, with its includes and the constants that it uses.

A line `--! include a b` puts other files, each once, before the one that has the line; `--! insert a` puts
the text of a file in its place. A line `--! keys x y` declares keys of the queue, which become the locals `X`
and `Y`. They come before the keys that a call adds; `FIXED` is their number. A line `--! rare x y` declares
keys that few queues have; `RARE` stands for all of them. Constants come from the package's options, states
and errors.
"""

import re
from collections.abc import Mapping
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple

from djqueue.core.errors import (
    ConfigurationError,
    JobFailedError,
    JobTimeoutError,
    StorageError,
    StorageUnavailableError,
)
from djqueue.core.job import DEAD_LETTER_REASONS
from djqueue.core.metrics import MAX_NAMES, NUMBERS
from djqueue.core.options import DAY, DEFAULT_OPTIONS, MAX_INTEGER
from djqueue.core.states import TERMINAL

from .records import CODES, COMPLETED_KINDS, NOT_PLAIN, STATES

Constant = str | int | Mapping[str, str | int]
COMMENT_TEXT = re.compile(r"--.*")
LINKED_ACTIVE = CODES["LINKED_ACTIVE"].encode()
WORD = re.compile(r"\b[A-Z][A-Z_]+\b(?:\.[A-Z_]+)?")
WORD_OR_STRING = re.compile(rf"'[^'\n]*'|(?<![.:]){WORD.pattern}")
DIRECTIVE = re.compile(r"^--! (include|keys|rare) (.+)$", re.MULTILINE)
INSERTION = re.compile(r"^ *--! insert (\w+)$", re.MULTILINE)
RARE = re.compile(r"\bRARE\b")
COMMENT = re.compile(r"^(?:[ \t]*--.*)?\n", re.MULTILINE)
"""Comments and empty lines, which Redis does not get."""
NAMES = (
    "jobs_about",
    "add",
    "check_group_mode",
    "clear",
    "cancel",
    "control",
    "counts",
    "emit",
    "enqueue",
    "expire",
    "explain",
    "export",
    "give",
    "group",
    "groups",
    "bulk_write",
    "items",
    "dead_letters",
    "limiter",
    "links",
    "manifest",
    "move",
    "names",
    "obliterate",
    "overview",
    "page",
    "peek",
    "plan",
    "finish_and_claim_fast",
    "finish_and_claim_plain",
    "read",
    "receive",
    "record",
    "remove",
    "renew",
    "report",
    "restore",
    "restoring",
    "results",
    "retry",
    "replace_payload",
    "rivals",
    "scan",
    "sent",
    "settle",
    "sizes",
    "snapshot",
    "stage",
    "staged_add",
    "staged_enqueue",
    "states",
    "surplus",
    "sweep",
    "unneeded",
    "update",
    "watch",
    "finish_and_claim",
    "worker",
)
ADDING = frozenset(
    {
        "add",
        "emit",
        "enqueue",
        "bulk_write",
        "replace_payload",
        "restore",
        "stage",
        "staged_add",
        "staged_enqueue",
        "update",
    }
)
"""Scripts that a server without free memory rejects. A job can only end after `report`, which is not one."""


READING = frozenset(
    {
        "counts",
        "dead_letters",
        "explain",
        "export",
        "groups",
        "items",
        "jobs_about",
        "links",
        "names",
        "overview",
        "page",
        "peek",
        "read",
        "results",
        "scan",
        "sizes",
        "snapshot",
        "states",
        "surplus",
    }
)
"""Scripts that only read, which a server that accepts no writes runs, too."""


class Script(NamedTuple):
    """A script with its includes."""

    name: str
    text: bytes
    sha: bytes
    keys: tuple[str, ...]
    """Names of the keys that every call declares first."""
    publishes: bool
    """Whether it gets the queue's prefix and the command that publishes."""


class ScriptPart(NamedTuple):
    """A file of a script."""

    text: str
    keys: list[str]
    rare: list[str]


@cache
def script(name: str) -> Script:
    """Return a script by name; `staged_x` runs `x` for a staged chunk of jobs."""
    parts: dict[str, ScriptPart] = {}
    inner = name.removeprefix("staged_")
    _collect(inner, parts)
    keys = tuple(dict.fromkeys(key for part in parts.values() for key in part.keys))
    rare = ", ".join(dict.fromkeys(key.upper() for part in parts.values() for key in part.rare))
    # A full server is emptied by its jobs: all but the scripts that add data run above `maxmemory`.
    flags = "allow-oom,no-writes" if name in READING else "allow-oom"
    heading = [] if name in ADDING else [f"#!lua flags={flags}"]
    heading += header("\n".join(part.text for part in parts.values()))
    heading += [f"local FIXED = {len(keys)}"]
    # Fields of a table would be slower than locals, of which two hundred are allowed.
    heading += [f"local {key.upper()} = KEYS[{index}]" for index, key in enumerate(keys, 1)]
    texts = (RARE.sub(rare, inline(COMMENT.sub("", part.text))) for part in parts.values())
    lines = [*heading, *texts]
    if name != inner:
        lines = ["local function run(KEYS, ARGV)", *lines, "end", source("staged")]
    text = "\n".join(lines).encode()
    sha = sha1(text, usedforsecurity=False).hexdigest().encode()
    return Script(name, text, sha, keys, publishes="request" in parts)


def source(name: str) -> str:
    """Return the text of a file."""
    try:
        return files(__package__).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")
    except OSError as error:
        raise StorageUnavailableError(f"the script {name!r} for Redis cannot be read: {error}") from error


def _collect(name: str, parts: dict[str, ScriptPart]) -> None:
    if name in parts:
        return
    text = INSERTION.sub(lambda match: source(match[1]), source(name))
    part = ScriptPart(text, [], [])
    for kind, words in DIRECTIVE.findall(text):
        for word in words.split():
            if kind != "include":
                part.keys.append(word)
                if kind == "rare":
                    part.rare.append(word)
            elif word == name:
                raise ConfigurationError(f"the script {name} includes itself")
            else:
                _collect(word, parts)
    parts[name] = part


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
    "METRIC_NAMES": MAX_NAMES,
    "METRIC_NUMBERS": NUMBERS,
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
    used = set(WORD.findall(COMMENT_TEXT.sub("", text)))
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
