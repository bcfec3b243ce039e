"""An app of a project, with jobs."""
