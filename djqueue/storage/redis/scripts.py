"""The Lua scripts: a file for each transition, with its includes and the constants that it uses.

A line `--! include a b` puts other files, each once, before the one that has the line; `--! insert a` puts
the text of a file in its place. A line `--! keys x y` declares keys of the queue, which become the locals `X`
and `Y`. They come before the keys that a call adds; `FIXED` is their number. A line `--! rare x y` declares
keys that few queues have; `RARE` stands for all of them.
"""

import re
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple

from djqueue.core.errors import ConfigurationError

from .constants import header, inline

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
    "obliterate",
    "overview",
    "page",
    "peek",
    "plan",
    "finish_and_claim_fast",
    "read",
    "receive",
    "record",
    "remove",
    "renew",
    "report",
    "restore",
    "restoring",
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


class Script(NamedTuple):
    """A script with its includes."""

    name: str
    text: bytes
    sha: bytes
    keys: tuple[str, ...]
    """Names of the keys that every call declares first."""


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
    heading = [] if name in ADDING else ["#!lua flags=allow-oom"]
    heading += header("\n".join(part.text for part in parts.values()))
    heading += [f"local FIXED = {len(keys)}"]
    # Fields of a table would be slower than locals, of which two hundred are allowed.
    heading += [f"local {key.upper()} = KEYS[{index}]" for index, key in enumerate(keys, 1)]
    texts = (RARE.sub(rare, inline(COMMENT.sub("", part.text))) for part in parts.values())
    lines = [*heading, *texts]
    if name != inner:
        lines = ["local function run(KEYS, ARGV)", *lines, "end", source("staged")]
    text = "\n".join(lines).encode()
    return Script(name, text, sha1(text, usedforsecurity=False).hexdigest().encode(), keys)


def source(name: str) -> str:
    """Return the text of a file."""
    return files(__package__).joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


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
