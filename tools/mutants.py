"""Break rules of the storages, one at a time; the state machine must find each.

    python -m tools.mutants             all mutants, in about 15 minutes
    python -m tools.mutants priority    those whose rule contains this word

Each mutant replaces a text of one file in a temporary copy of the checkout. The state machine of
`djqueue.testing.contract.machine` then runs there, with its normal number of examples.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import NamedTuple

CHECKOUT = Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "demo", "build", "dist", "node_modules")
TEST = "test_random_operations_behave_like_the_reference"
TESTS = {
    "engine": f"tests/storage/test_memory.py::TestOnFourShards::{TEST}",
    "redis": f"tests/storage/redis/test_access_list.py::TestContract::{TEST}",
    "database": f"tests/storage/database/test_conformance.py::TestContract::{TEST}",
}
ENGINE = "djqueue/core/engine/"
SQL = "djqueue/storage/database/"
LUA = "djqueue/storage/redis/lua/"
MACHINE = "djqueue/testing/contract/machine.py"
WITHOUT_SHRINKING = (
    ("from hypothesis import HealthCheck,", "from hypothesis import HealthCheck, Phase,"),
    ("report_multiple_bugs=False,", "report_multiple_bugs=False, phases=[Phase.generate],"),
)


class Mutant(NamedTuple):
    """A broken rule."""

    rule: str
    file: str
    before: str
    after: str

    @property
    def test(self) -> str:
        """Node id of the state machine that must find it."""
        storages = {LUA: "redis", SQL: "database", "djqueue/core/": "engine"}
        return next(TESTS[storage] for folder, storage in storages.items() if self.file.startswith(folder))


MUTANTS = (
    Mutant(
        "priority is ignored",
        ENGINE + "joblists.py",
        "        fifo = self._fifos.get(priority)\n",
        "        priority = 0\n        fifo = self._fifos.get(priority)\n",
    ),
    Mutant(
        "every attempt of a job has the same token",
        ENGINE + "claimer.py",
        "job.token = token = next(tokens)",
        "job.token = token = abs(hash((job.queue, job.id))) + 1",
    ),
    Mutant(
        "unique key is free while its job waits for a retry",
        ENGINE + "queue.py",
        "        job.run_at = changes.now + delay\n",
        "        job.run_at = changes.now + delay\n        self.unique.release(job, changes.now)\n",
    ),
    Mutant(
        "group limit is one too high",
        ENGINE + "groups.py",
        "        room = self.limit_of(name) - group.active\n",
        "        room = self.limit_of(name) - group.active + 1\n",
    ),
    Mutant(
        "failed dependency releases its dependents",
        ENGINE + "settlement.py",
        'if ended is State.COMPLETED or policy == "ignore":',
        'if ended in (State.COMPLETED, State.FAILED) or policy == "ignore":',
    ),
    Mutant(
        "only the first attempt is counted",
        ENGINE + "claimer.py",
        "job.attempts = attempts = job.attempts + 1",
        "job.attempts = attempts = 1",
    ),
    Mutant(
        "delay is ignored", ENGINE + "queue.py", "elif job.run_at > now:", "elif job.run_at > now + 10_000:"
    ),
    Mutant(
        "renewal does not extend the lease",
        ENGINE + "attempts.py",
        "lease\n                renewals.append(Renewal(True",
        "lease // 2\n                renewals.append(Renewal(True",
    ),
    Mutant("pause is ignored", ENGINE + "claimer.py", "if queue.paused:", "if queue.paused and now < 0:"),
    Mutant(
        "one ended attempt too many is kept",
        "djqueue/core/enginejob.py",
        "    excess = len(job.history) - limit\n",
        "    excess = len(job.history) - limit - 1\n",
    ),
    Mutant(
        "low priority goes first",
        LUA + "ready.lua",
        "pack('>I4', PRIORITY_BASE - priority_of(job))",
        "pack('>I4', PRIORITY_BASE + priority_of(job))",
    ),
    Mutant(
        "stale token is accepted",
        LUA + "job.lua",
        "if not st or sub(st, 2, 9) ~= token then return false end",
        "if not st then return false end",
    ),
    Mutant(
        "unique key is free while its job waits for a retry",
        LUA + "outcomes.lua",
        "  b[RUN_AT] = now + data[1]\n",
        "  b[RUN_AT] = now + data[1]\n  release_key(job)\n",
    ),
    Mutant(
        "group limit is one too high",
        LUA + "ready.lua",
        "return rules.limit - (call('HGET', GROUP_ACTIVE, group) or 0)",
        "return rules.limit + 1 - (call('HGET', GROUP_ACTIVE, group) or 0)",
    ),
    Mutant(
        "failed dependency releases its dependents",
        LUA + "receive.lua",
        "  if state == 'completed' then\n",
        "  if state == 'completed' or state == 'failed' then\n",
    ),
    Mutant(
        "only the first attempt is counted",
        LUA + "finish_and_claim.lua",
        "b[CANCEL] = b[ATTEMPTS] + 1, worker, now, 0",
        "b[CANCEL] = 1, worker, now, 0",
    ),
    Mutant(
        "delay is ignored",
        LUA + "ready.lua",
        "  if job.b[RUN_AT] > now then\n",
        "  if job.b[RUN_AT] > now + 10000 then\n",
    ),
    Mutant(
        "renewal does not extend the lease",
        LUA + "renew.lua",
        "call('ZADD', LEASE, until_when, ARGV[i])",
        "call('ZADD', LEASE, 'NX', until_when, ARGV[i])",
    ),
    Mutant(
        "dead letter is not written",
        LUA + "completion.lua",
        "call('ZADD', DEAD, next_numbers('deaths', 1), job.id)",
        "next_numbers('deaths', 1)",
    ),
    Mutant(
        "one ended attempt too many is kept",
        LUA + "completion.lua",
        "while count >= keep.attempts do",
        "while count > keep.attempts do",
    ),
    Mutant(
        "priority is ignored",
        SQL + "claim.py",
        'ORDER BY rank, seq LIMIT ?{tx.dialect.skip_locked}"\n        chosen = ',
        'ORDER BY seq LIMIT ?{tx.dialect.skip_locked}"\n        chosen = ',
    ),
    Mutant(
        "every attempt of a job has the same token",
        SQL + "claim.py",
        "ELSE token END + 1, expires_at = NULL",
        "ELSE token END, expires_at = NULL",
    ),
    Mutant(
        "unique key is free while its job waits for a retry",
        SQL + "transitions.py",
        "    job.run_at = tx.now + delay\n    front =",
        "    job.run_at = tx.now + delay\n"
        "    free_key(tx, job.queue, job.options.unique_key, job.pk)\n    front =",
    ),
    Mutant(
        "unique key of a completed job is not freed",
        SQL + "finish.py",
        "if claim.unique_key is not None:",
        "if claim.unique_key is not None and claim.attempts > 1:",
    ),
    Mutant(
        "group limit is one too high",
        SQL + "stored.py",
        "room = self.limit - (self.active() if active is None else active)",
        "room = self.limit - (self.active() if active is None else active) + 1",
    ),
    Mutant(
        "failed dependency releases its dependents",
        SQL + "transitions.py",
        'if ended is State.COMPLETED or policy == "ignore":',
        'if ended in (State.COMPLETED, State.FAILED) or policy == "ignore":',
    ),
    Mutant(
        "only the first attempt is counted",
        SQL + "claim.py",
        "attempts = attempts + 1, started_at = ?",
        "attempts = 1, started_at = ?",
    ),
    Mutant(
        "delay is ignored",
        SQL + "enqueue.py",
        "State.DELAYED if run_at > tx.now else",
        "State.DELAYED if run_at > tx.now + 10_000 else",
    ),
    Mutant(
        "renewal does not extend the lease",
        SQL + "finish.py",
        "tx.tick + length, values)",
        "tx.tick + length // 2, values)",
    ),
    Mutant(
        "pause is ignored",
        SQL + "claim.py",
        "    if queue.paused:\n",
        "    if queue.paused and tx.now < 0:\n",
    ),
    Mutant(
        "one ended attempt too many is kept",
        SQL + "stored.py",
        "tx.database.policy(job.queue).retention.attempts.count)",
        "tx.database.policy(job.queue).retention.attempts.count + 1)",
    ),
)


def main(words: list[str]) -> int:
    """Run the mutants whose rules contain one of the words, and print a table; 1 if one survives."""
    mutants = [one for one in MUTANTS if not words or any(word in one.rule for word in words)]
    survived = 0
    print(f"{'rule':52} {'file':34} {'result':9} {'seconds':>7}  failure", flush=True)
    with TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(CHECKOUT, copy, ignore=LEFT_OUT, ignore_dangling_symlinks=True)
        for before, after in WITHOUT_SHRINKING:
            replace(copy / MACHINE, before, after)
        for test in sorted({mutant.test for mutant in mutants}):
            if (line := failure(test, copy)) is not None:
                raise SystemExit(f"{test} fails without a mutant: {line}")
        for mutant in mutants:
            started = monotonic()
            line = failure_of(mutant, copy)
            survived += line is None
            result = "survived" if line is None else "found"
            seconds = monotonic() - started
            file = mutant.file.removeprefix(ENGINE).removeprefix("djqueue/storage/")
            print(f"{mutant.rule:52} {file:34} {result:9} {seconds:7.1f}  {line or ''}", flush=True)
    print(f"{len(mutants) - survived} of {len(mutants)} found")
    return int(survived > 0)


def failure_of(mutant: Mutant, copy: Path) -> str | None:
    """Return the first line of the failure that a mutant causes; None if the state machine passes."""
    file = copy / mutant.file
    original = file.read_text()
    replace(file, mutant.before, mutant.after)
    try:
        return failure(mutant.test, copy)
    finally:
        file.write_text(original)


def failure(test: str, copy: Path) -> str | None:
    """Return the first line of the failure of a test; None if it passes."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-n", "0", "-x", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, test]
    found = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if found.returncode == 0:
        return None
    lines = [line[1:].strip() for line in found.stdout.splitlines() if line.startswith("E   ")]
    if "1 failed" not in found.stdout or not lines:
        raise SystemExit(f"pytest did not run {test}:\n{found.stdout[-2_000:]}{found.stderr[-2_000:]}")
    return lines[0][:100]


def replace(file: Path, before: str, after: str) -> None:
    """Replace a text that must occur exactly once in a file."""
    text = file.read_text()
    if text.count(before) != 1:
        raise SystemExit(
            f"{file} must contain this text once, but has it {text.count(before)} times:\n{before}"
        )
    file.write_text(text.replace(before, after))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
