"""The verbs of `manage.py djqueue`, one module for each group.

A module's `add(verbs)` declares its verbs. Each has a parser and a function that takes the parsed options
and an `Output`, and raises CommandError if it fails.
"""
