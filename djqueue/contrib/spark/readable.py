"""Convert payloads to readable JSON."""

import json
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from djqueue.codecs import decode
from djqueue.core.errors import DjqueueError


def as_json(payload: bytes | None, content_type: str) -> str | None:
    """Return a payload as JSON, or None if there is none, or if it cannot be decoded."""
    if payload is None:
        return None
    try:
        return json.dumps(_plain(decode(payload, content_type)), ensure_ascii=False)
    except (DjqueueError, ValueError, TypeError, RecursionError):
        return None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return b64encode(bytes(value)).decode()
    return str(value)
