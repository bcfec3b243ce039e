"""Run the pipeline commands without a Django project: `python -m djqueue.contrib.spark`."""

import sys

from djqueue.contrib.spark.pipeline.commands import main

sys.exit(main(sys.argv[1:]))
