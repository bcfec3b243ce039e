"""Jobs in the project's own database: the engine, with a journal to the models."""

from .storage import JournaledStorage

__all__ = ["JournaledStorage"]
