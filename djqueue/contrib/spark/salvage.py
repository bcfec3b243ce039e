"""The values of a row that is no job, as far as they can be kept."""

from collections.abc import Mapping
from typing import Any

from djqueue.codecs import MSGPACK, encode
from djqueue.core.errors import SerializationError

LEAST = 64 * 1024
"""Bytes that a row may have in any case."""
TEXT = 200
"""Characters of what is kept as a text instead."""


def salvaged(row: Mapping[str, Any], most: int) -> bytes:
    """A payload with the row's values as arguments by name, of about `most` bytes.

    What cannot be packed is there as a text; of what is too much the largest values are only mentioned.
    """
    most = max(most, LEAST)
    kept: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for name, value in row.items():
        try:
            sizes[name], kept[name] = len(encode(value, MSGPACK)), value
        except SerializationError:
            kept[name] = repr(value)[:TEXT]
            sizes[name] = len(kept[name])
    total = sum(sizes.values())
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if total <= most:
            break
        kept[name] = f"({sizes[name]} bytes, left out)"
        total -= sizes[name] - len(kept[name])
    return encode({"args": [], "kwargs": kept}, MSGPACK)
