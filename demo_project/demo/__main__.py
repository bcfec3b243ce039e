"""Run the demo: prepare the database, enqueue, serve the admin, work the jobs, tell how it goes.

Then a little business goes on until Ctrl-C: letters, payments and workflows, with a deploy that brings an
error, another one that mends it, an airline in trouble, a paused queue, and workers that are killed.

`--check` runs the first part in a fresh directory, and ends by itself with counts that must add up.
"""

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import django

from .children import PORT, free_port
from .terminal import VAR, end_with

PLACE = Path(__file__).resolve().parents[1] / "var"
STORAGES = ("sqlite", "postgres", "redis", "scheduler")


def main() -> int:
    options = parse()
    with ExitStack() as stack:
        if options.check:
            os.environ[VAR] = str(fresh_directory(stack))
        else:
            os.environ[VAR] = str(own_directory(options.storage))
        os.environ["DJQUEUE_DEMO_STORAGE"] = options.storage
        os.environ["DJQUEUE_DEMO_PORT"] = str(free_port())
        os.environ["DJANGO_DEBUG"] = "0"
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "demo_project.settings")
        django.setup()
        from .run import check, stay_up  # needs the settings and the models

        return check(options.flights) if options.check else stay_up(options.flights, options.port)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo_project.demo", description="The djqueue demo.")
    parser.add_argument(
        "--check", action="store_true", help="run in a fresh directory, check the counts and end"
    )
    parser.add_argument(
        "--flights", type=positive, metavar="N", help="take the first N of the 336,776 flights only"
    )
    parser.add_argument(
        "--storage",
        choices=STORAGES,
        default="sqlite",
        help="where the jobs are (default: sqlite); starts the server that it needs",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=PORT,
        help=f"port of the admin, or a free one (default: {PORT})",
    )
    return parser.parse_args()


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least one flight is needed")
    return number


def own_directory(storage: str) -> Path:
    """Return the folder of the demo on a storage: SQLite's, or one in it."""
    folder = Path(os.environ.get(VAR) or PLACE)
    return folder if storage == "sqlite" else folder / storage


def fresh_directory(stack: ExitStack) -> Path:
    if VAR not in os.environ:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="djqueue-demo-")))
    directory = Path(os.environ[VAR])
    if directory.exists() and any(directory.iterdir()):
        sys.exit(f"{VAR}: {directory} is not empty, and --check wants a fresh directory.")
    return directory


if __name__ == "__main__":
    end_with(main)
