"""Backups: everything that a storage holds, as compressed files in one of the project's file storages.

`archive` writes and reads the data, `store` keeps the files, `taking` and `restoring` move jobs between them
and a storage, and `schedule` takes backups in `runworkers`.
"""
