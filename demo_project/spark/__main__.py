"""Run the season's claims through Spark: enqueue, work, roll up, archive, and check that all adds up.

What it writes stays in demo_project/var/spark, one folder for each season: a second run finds all done.
"""

import argparse
import os
from pathlib import Path

import django

from demo_project.demo.children import HOST, free_port
from demo_project.demo.terminal import VAR, end_with

PLACE = Path(__file__).resolve().parents[1] / "var" / "spark"


def main() -> int:
    options = parse()
    season = "2013" if options.month is None else f"2013-{options.month:02}"
    os.environ[VAR] = str(Path(os.environ.get(VAR) or PLACE) / season)
    port = free_port()
    os.environ["DJQUEUE_DEMO_REDIS"] = f"redis://{HOST}:{port}/0"
    os.environ["DJANGO_SETTINGS_MODULE"] = "demo_project.spark.settings"
    os.environ["DJANGO_DEBUG"] = "0"
    django.setup()
    from .run import run  # needs the settings and the models

    return run(season, options.month, port, serve=options.serve)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m demo_project.spark", description="The djqueue demo, by way of Spark."
    )
    parser.add_argument("--month", type=int, choices=range(1, 13), metavar="1-12", help="one month only")
    parser.add_argument("--serve", action="store_true", help="show the admin meanwhile, until Ctrl-C")
    return parser.parse_args()


if __name__ == "__main__":
    end_with(main)
