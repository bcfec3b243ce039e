"""The pages of the dashboard: each module has a page, or a few, with the data that only they read."""
