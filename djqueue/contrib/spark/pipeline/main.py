"""From a command line to an exit code."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from djqueue.core.errors import DjqueueError, OptionError

from .commands import PipelineContext, run
from .parser import HELP, PipelineHelpFormatter, add_commands

DONE, FAILED, WRONG = 0, 1, 2


def parser() -> ArgumentParser:
    """Of `python -m djqueue.contrib.spark`."""
    made = ArgumentParser(
        prog="python -m djqueue.contrib.spark", description=HELP, formatter_class=PipelineHelpFormatter
    )
    add_commands(made, is_project=False)
    return made


def main(argv: Sequence[str]) -> int:
    """Do what a command line says; returns the exit code."""
    args = parser().parse_args(argv)
    prefix = {"keyPrefix": args.key_prefix} if args.key_prefix else {}
    place = PipelineContext({"url": args.url, **prefix}, database=getattr(args, "database", None))
    try:
        run(args, place, _print)
    except OptionError as error:
        sys.stderr.write(f"{error}\n")
        return WRONG
    except DjqueueError as error:
        sys.stderr.write(f"{error}\n")
        return FAILED
    return DONE


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
