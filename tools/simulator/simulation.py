"""One simulation from its beginning to its end."""

import asyncio
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from .database import prepare
from .defects import without_fix
from .monitor import Monitor
from .nodes import Node
from .patches import simulated
from .workload import Producer
from .world import World

NODES = (("first", "wait"), ("second", "wait"), ("helper", "work"), ("other", "work"))


class Result(NamedTuple):
    """What came of a simulation."""

    violation: str | None
    steps: int
    digest: str
    """A hash of all events: two runs of one seed have the same."""
    summary: str


def simulate(seed: int, steps: int, **options: Any) -> Result:
    """Simulate in a child process, so that nothing of a simulation is left behind for the next one.

    See `simulate_here` for the options. Raises RuntimeError if the simulator itself fails.
    """
    prepare()
    sys.stdout.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        code = 1
        try:
            found = simulate_here(seed, steps, **options)
            with os.fdopen(writer, "wb") as stream:
                pickle.dump(tuple(found), stream)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        data = stream.read()
    os.waitpid(child, 0)
    if not data:
        raise RuntimeError(f"the simulation of seed {seed} did not end")
    return Result(*pickle.loads(data))


def simulate_here(
    seed: int,
    steps: int,
    *,
    trace: Callable[[str], object] | None = None,
    without: frozenset[str] = frozenset(),
    disable: frozenset[str] = frozenset(),
) -> Result:
    """Simulate so many steps with faults, and then the time until everything is done.

    without: what does not happen; `helpers` leaves out the processes that work for a scheduler.
    disable: fixes that are taken away: see `defects`.
    """
    world = World(seed, trace=trace, without=without)
    with ExitStack() as stack:
        for fix in sorted(disable):
            stack.enter_context(without_fix(fix))
        stack.enter_context(simulated(world))
        world.database.install()
        asyncio._set_running_loop(world.loop)
        world.monitor = Monitor()
        Producer()
        for name, standby in NODES:
            if standby == "work" and "helpers" in without:
                continue
            node = Node(name, standby)
            world.nodes.append(node)
            node.start()
        violation = world.run(steps)
        return Result(
            violation, world.steps, world.digest, f"{world.faults} faults, {world.monitor.summary()}"
        )


def shrink(seed: int, steps: int, *, without: frozenset[str], disable: frozenset[str]) -> int:
    """Find the fewest steps with faults with which a seed still fails."""
    low, high = 0, steps
    while low < high:
        middle = (low + high) // 2
        if simulate(seed, middle, without=without, disable=disable).violation is None:
            low = middle + 1
        else:
            high = middle
    return high
