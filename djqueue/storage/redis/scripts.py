"""The Lua scripts: a file for each transition, with the files that it includes before it.

A line `--! include a b` takes in other files, `--! keys x y` names keys of the queue: they are declared, in
this order, before those that a call adds, and the script has them as locals `X` and `Y`; `FIXED` is how many.
"""

import re
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple

from djqueue.core.errors import ConfigurationError

from .constants import header

DIRECTIVE = re.compile(r"^--! (include|keys) (.+)$", re.MULTILINE)
NAMES = (
    "jobs_about",
    "add",
    "check_group_mode",
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
    "obliterate",
    "overview",
    "page",
    "peek",
    "finish_and_claim_fast",
    "read",
    "receive",
    "record",
    "remove",
    "renew",
    "report",
    "retry",
    "replace_payload",
    "rivals",
    "scan",
    "sent",
    "settle",
    "sizes",
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


BRINGING = frozenset(
    {
        "add",
        "emit",
        "enqueue",
        "bulk_write",
        "replace_payload",
        "stage",
        "staged_add",
        "staged_enqueue",
        "update",
    }
)
"""Those that a full server refuses. Not `report`: a job ends after its last report is there."""


class Script(NamedTuple):
    """A script with what it includes."""

    name: str
    text: bytes
    sha: bytes
    keys: tuple[str, ...]
    """Names of the keys that every call declares first."""


@cache
def script(name: str) -> Script:
    """The script of a name; `staged_x` is `x` for a chunk of jobs that was put aside."""
    parts: dict[str, tuple[str, list[str]]] = {}
    inner = name.removeprefix("staged_")
    _collect(inner, parts)
    keys = tuple(dict.fromkeys(key for _, names in parts.values() for key in names))
    # What is full is worked off: all but what brings more may run above `maxmemory`.
    heading = [] if name in BRINGING else ["#!lua flags=allow-oom"]
    heading += header("\n".join(text for text, _ in parts.values()))
    heading += [f"local FIXED = {len(keys)}"]
    # One local in one table would be slower, two hundred locals are allowed.
    heading += [f"local {key.upper()} = KEYS[{place}]" for place, key in enumerate(keys, 1)]
    lines = [*heading, *(text for text, _ in parts.values())]
    if name != inner:
        lines = ["local function run(KEYS, ARGV)", *lines, "end", source("staged")]
    text = "\n".join(lines).encode()
    return Script(name, text, sha1(text, usedforsecurity=False).hexdigest().encode(), keys)


def source(name: str) -> str:
    """The text of one file, as it is written."""
    return files(__package__).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


def _collect(name: str, parts: dict[str, tuple[str, list[str]]]) -> None:
    if name in parts:
        return
    text = source(name)
    keys: list[str] = []
    for kind, words in DIRECTIVE.findall(text):
        if kind == "keys":
            keys += words.split()
            continue
        for included in words.split():
            if included == name:
                raise ConfigurationError(f"the script {name} includes itself")
            _collect(included, parts)
    parts[name] = (text, keys)
