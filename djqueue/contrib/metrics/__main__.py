"""Print the Grafana dashboard: `python -m djqueue.contrib.metrics > djqueue.json`."""

import sys
from importlib import resources

sys.stdout.write(resources.files("djqueue.contrib.metrics").joinpath("grafana.json").read_text())
