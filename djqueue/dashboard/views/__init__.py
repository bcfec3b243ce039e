"""Views of the dashboard, one subject per module."""
