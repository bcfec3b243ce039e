"""The subcommands of `manage.py djqueue`, one module for each subject.

A module's `add(subcommands)` declares its subcommands. Each has a parser and a function that takes the parsed
options and an `Output`, and raises CommandError if it fails.
"""
