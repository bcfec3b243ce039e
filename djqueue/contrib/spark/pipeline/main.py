"""Run a command line, and return its exit code."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from djqueue.core.errors import DjqueueError, OptionError

from .commands import PipelineContext, run
from .parser import HELP, PipelineHelpFormatter, add_commands

DONE, FAILED, WRONG = 0, 1, 2


def parser() -> ArgumentParser:
    """Return the parser of `python -m djqueue.contrib.spark`."""
    parser = ArgumentParser(
        prog="python -m djqueue.contrib.spark", description=HELP, formatter_class=PipelineHelpFormatter
    )
    add_commands(parser, is_project=False)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run a command line. Returns the exit code."""
    args = parser().parse_args(argv)
    prefix = {"keyPrefix": args.key_prefix} if args.key_prefix else {}
    context = PipelineContext({"url": args.url, **prefix}, database=getattr(args, "database", None))
    try:
        run(args, context, _print)
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
