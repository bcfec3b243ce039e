"""The command of the Spark pipelines."""
