"""An app of a project whose jobs are not in `jobs.py`."""
