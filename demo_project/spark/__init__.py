"""The demo's claims by way of Spark, on Redis: python -m demo_project.spark."""
