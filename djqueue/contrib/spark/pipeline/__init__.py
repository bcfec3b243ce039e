"""What goes on around the queue, in Spark: bulk enqueue, rollups, archive, replay, backfill.

Functions here take a session and DataFrames; `commands` is what `python -m djqueue.contrib.spark` and
`manage.py djqueue_spark` run. See docs/spark-pipeline.md. Importing this needs no pyspark.
"""
