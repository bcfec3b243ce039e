"""One run of one measure, in this process: prints its values as a JSON object."""

import json
import sys

from tools.benchmarks.measures import MEASURES, STORAGES


def main() -> None:
    """Measure what the command line names."""
    storage, metric, *rest = sys.argv[1:]
    with STORAGES[storage]() as opened:
        print(json.dumps(MEASURES[metric].function(opened, 0.1 if "--quick" in rest else 1.0)))


if __name__ == "__main__":
    main()
