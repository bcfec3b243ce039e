"""`python -m djqueue.contrib.spark`: what goes on around the queue, without a project."""

import sys

from djqueue.contrib.spark.pipeline.main import main

sys.exit(main(sys.argv[1:]))
