"""Lua scripts: their includes, their keys, and the state changes of the transition table."""

import os
import re
import subprocess
import sys
from pathlib import Path

from djqueue.core.options import DEFAULT_OPTIONS
from djqueue.core.states import TRANSITIONS, State
from djqueue.storage.redis import scripts

CHANGE = re.compile(r"--@ ([a-z_]+): ([a-z|]+) -> ([a-z|]+)")
NO_CHANGE = re.compile(r"--@ nothing changes")
SAVED = re.compile(r"\bsave\(job\)|call\('HSET', ST,|(?:_sets|st_changes)\[n \+ 2\] =")
LUA = sorted(Path(scripts.__file__).parent.glob("lua/*.lua"))
FILES = sorted(
    {
        *(name for name in scripts.NAMES if "staged_" not in name),
        "base",
        "job",
        "outcomes",
        "ready",
        "complete",
        "completion",
        "removal",
        "retention",
        "staged",
    }
)


def changes():
    """(name, source, target, file) of every change of state that a script says it makes."""
    for name in FILES:
        for transition, sources, targets in CHANGE.findall(scripts.source(name)):
            for source in sources.split("|"):
                for target in targets.split("|"):
                    yield transition, State(source), State(target), name


def test_every_state_change_of_scripts_is_in_the_transition_table():
    allowed = {(row.name, row.source, target) for row in TRANSITIONS for target in row.targets}

    found = {change[:3] for change in changes()}

    assert found - allowed == set()


def test_every_row_of_the_transition_table_has_a_script():
    found = {change[:3] for change in changes()}

    for row in TRANSITIONS:
        assert any((row.name, row.source, target) in found for target in row.targets), row


def test_every_line_that_writes_a_state_names_its_transition():
    unnamed = [
        (name, line)
        for name in FILES
        for line in scripts.source(name).splitlines()
        if SAVED.search(code := line.split("--")[0])
        and not ("local function" in code or "code .." in code)
        and not (CHANGE.search(line) or NO_CHANGE.search(line))
    ]

    assert unnamed == []


def test_scripts_declare_every_key_that_they_use():
    undeclared = []
    for name in scripts.NAMES:
        text = scripts.script(name).text.decode()
        declared = set(re.findall(r"^local ([A-Z_]+) = KEYS\[\d+\]$", text, re.MULTILINE))
        used = {key.strip() for key in re.findall(r"call\('[A-Z]+', ([^,)]+)", text)}
        undeclared += [(name, key) for key in used - declared - LOCALS if not key.startswith("KEYS[")]

    assert undeclared == []


def test_lua_files_begin_with_their_purpose_and_repeat_no_constants():
    texts = {path.stem: path.read_text() for path in LUA}

    assert [name for name, text in texts.items() if not text.startswith("-- ")] == []
    repeated = ("3600000", "86400000", "2147483648", "djqueue.core.")
    assert [(name, value) for name, text in texts.items() for value in repeated if value in text] == []


def test_lua_constants_come_from_the_options_and_states():
    [names] = scripts.header("RESULT_TTL NAMES -- ENDED")

    assert {*re.findall(r"'(\w+)'", names)} == set(State)
    inlined = scripts.inline(
        "x(RESULT_TTL, DEFAULT.MAX_STALLS, 'RESULT_TTL', keep.RESULT_TTL, NAMES[ACTIVE])"
    )
    ttl, stalls = DEFAULT_OPTIONS.result_ttl, DEFAULT_OPTIONS.max_stalls
    assert inlined == f"x({ttl}, {stalls}, 'RESULT_TTL', keep.RESULT_TTL, NAMES['a'])"


def test_scripts_are_identical_in_every_process():
    program = (
        "from djqueue.storage.redis.scripts import NAMES, script\n"
        "print(*(script(name).sha.decode() for name in NAMES))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }

    assert found == {" ".join(scripts.script(name).sha.decode() for name in scripts.NAMES)}


def test_scripts_use_the_given_time_or_that_of_redis():
    texts = {name: scripts.script(name).text.decode() for name in scripts.NAMES}

    others = [
        name for name, text in texts.items() if text.count("ARGV[1]") != text.count("tonumber(ARGV[1]) or ")
    ]
    assert others == []


LOCALS = {
    "'NX'",
    "hash",
    "result_key",
    "log_key",
    "items_key",
    "moved_key",
    "ARGV[4]",
    "key",
    "unpack(gone",
    "order",
}
"""Names that hold a declared key, in functions that are given it."""


def test_a_request_sequence_is_the_first_key_of_its_script():
    keys = {name: scripts.script(name).keys for name in scripts.NAMES}

    assert [name for name, given in keys.items() if "sequence" in given[1:]] == []


def test_redis_compiles_every_script(redis_options, redis_server):
    """Lua allows two hundred local names at a time, which files that are included use up."""
    loaded = {name: redis_server.run("SCRIPT", "LOAD", scripts.script(name).text) for name in scripts.NAMES}

    assert loaded == {name: scripts.script(name).sha.decode() for name in scripts.NAMES}
