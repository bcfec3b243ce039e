"""The dashboard: pages in the admin on what the queue does, and what can be done about it.

A page is a view in `views`, listed with its right in `pages`. Views read through `queries`, never from a
storage or a table themselves, and render through a `DashboardSite`, which knows their admin site.
"""
