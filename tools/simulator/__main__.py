"""Run simulations: `python -m tools.simulator --seed 7 --steps 5000`.

A seed that fails is printed with the command that replays it. `--trace` prints every event, `--shrink` looks
for the fewest steps with which the seed still fails.
"""

import argparse
import logging
import os
import sys
import time


def main() -> int:
    """Parse the arguments, simulate, and return 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--steps", type=int, default=5_000, help="steps with faults, for each seed")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--shrink", action="store_true", help="find the fewest steps that fail")
    parser.add_argument("--keep-going", action="store_true", help="go on after a seed that failed")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="FAULT",
        help="kill, stop, break, freeze, long-freeze, clock-step, clock-forward, clock-back, messages, "
        "database, keyed (changes of jobs with unique keys) or helpers",
    )
    parser.add_argument("--disable", action="append", default=[], help="a fix to take away: see defects.py")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of texts is a part of the trace.
        os.execve(sys.executable, [sys.executable, "-m", "tools.simulator", *sys.argv[1:]], _environment())
    return _simulate(options)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONHASHSEED": "0"}


def _simulate(options: argparse.Namespace) -> int:
    os.environ["DJANGO_SETTINGS_MODULE"] = "tools.simulator.settings"
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"
    import django

    django.setup()
    logging.disable(logging.CRITICAL)
    from .simulation import shrink, simulate

    failed = 0
    for seed in range(options.seed, options.seed + options.seeds):
        started = time.monotonic()
        trace = print if options.trace else None
        chosen = {"without": frozenset(options.without), "disable": frozenset(options.disable)}
        outcome = simulate(seed, options.steps, trace=trace, **chosen)
        seconds = time.monotonic() - started
        if outcome.violation is None:
            print(f"seed {seed}: {outcome.summary}; trace {outcome.digest}; {seconds:.1f} s", flush=True)
            continue
        failed += 1
        steps = options.steps
        if options.shrink:
            steps = shrink(seed, outcome.steps, **chosen)
        print(f"seed {seed} failed at step {outcome.steps}: {outcome.violation}")
        words = [f"--without {one}" for one in options.without] + [
            f"--disable {one}" for one in options.disable
        ]
        command = ["python -m tools.simulator", f"--seed {seed}", f"--steps {steps}", *words, "--trace"]
        print(f"replay: {' '.join(command)}", flush=True)
        if not options.keep_going:
            break
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
