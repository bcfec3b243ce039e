"""Jobs in SQLite or PostgreSQL, without a scheduler: every process runs the same statements."""

from .storage import DatabaseStorage

__all__ = ["DatabaseStorage"]
