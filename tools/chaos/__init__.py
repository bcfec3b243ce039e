"""Kill random processes of a running project, and count what became of its jobs."""
