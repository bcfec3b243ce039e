"""Backups: everything that a storage holds, as compressed files in one of the project's file storages.

`archive` defines the format, `store` keeps the files, `transfer` moves jobs between them and a storage,
`lease` lets one process at a time take a backup, and `schedule` takes backups in `runworkers`.
"""
