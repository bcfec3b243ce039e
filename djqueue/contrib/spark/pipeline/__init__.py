"""Archive ended jobs and compute rollups on Spark. See docs/spark-pipeline.md.

The functions take a session and DataFrames. `commands` implements `python -m djqueue.contrib.spark` and
`manage.py djqueue_spark`. Importing this package does not require pyspark.
"""
