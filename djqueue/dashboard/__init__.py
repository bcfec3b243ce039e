"""The dashboard: admin pages that show the state of the queues and act on jobs.

A page is a view in `views`, registered in `pages` with the permission that it requires. Views read through
`queries` and the other read models, never from a storage or a table themselves, and render through a
`DashboardSite`, which knows their admin site.
"""
