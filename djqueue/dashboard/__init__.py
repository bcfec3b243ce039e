"""The dashboard: admin pages that show the state of the queues and act on jobs.

A page is a view in `views`, registered there with the permission that it requires and listed in `urls`. Views
render through a `DashboardSite` (`site`), which knows their admin site. They read the storage and the tables
through shared caches (`reading`, `boards`), and each view's module has the reads that only it needs.
"""
