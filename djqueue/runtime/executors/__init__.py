"""Where handlers run."""

from .inline import InlineExecutor

__all__ = ["InlineExecutor"]
