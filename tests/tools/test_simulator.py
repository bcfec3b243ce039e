"""Simulations with fixed seeds, which hold the invariants of the storage for about 100,000 steps.

Each runs in a process of its own, as `python -m tools.simulator` does: the order of sets belongs to a trace.
"""

import re
import shlex
import subprocess
import sys

import pytest

from tests.runtime.project import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.scheduler]
STEPS = 5_000


def simulate(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the simulator to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tools.simulator", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


THOROUGH = [pytest.param(seed, marks=pytest.mark.thorough) for seed in range(2, 21)]


@pytest.mark.parametrize("seed", [1, *THOROUGH])
def test_every_invariant_holds_through_random_faults(seed: int) -> None:
    done = simulate("--seed", str(seed), "--steps", str(STEPS))

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^seed {seed}: [1-9]\d* faults", done.stdout, re.MULTILINE), done.stdout


def test_seed_gives_same_trace_every_time() -> None:
    traces = [simulate("--seed", "3", "--steps", "1500", "--trace").stdout for _ in range(2)]

    first, second = ([line for line in trace.splitlines() if " trace " not in line] for trace in traces)
    assert len(first) > 100
    assert first == second


@pytest.mark.parametrize("fix", ["restart", "lease"])
def test_simulator_finds_and_replays_defect_that_fix_removes(fix: str) -> None:
    found = simulate("--seeds", "10", "--steps", str(STEPS), "--disable", fix)

    assert found.returncode == 1, found.stdout + found.stderr
    failure, replay = found.stdout.splitlines()[-2:]
    command = shlex.split(replay.removeprefix("replay: python -m tools.simulator "))
    again = simulate(*command)
    assert again.returncode == 1
    assert failure in again.stdout
