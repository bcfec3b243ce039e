"""Processes of their own for jobs: forked from a template, watched, limited and killed by their worker."""
