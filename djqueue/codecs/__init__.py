"""Encode values to bytes and decode them, by content type.

The default is MessagePack with extension types, which returns a value with exactly the same types, or
refuses to encode it. All other codecs are those of kombu's registry; `kombu`, which the extra of this name
installs, is imported when one is used.
"""

import hashlib
import json
from collections.abc import Callable, Collection
from typing import Any

from djqueue.core.errors import SerializationError
from djqueue.core.options import MSGPACK

from . import msgpack
from .msgpack import CallsEncoder
from .refusals import not_accepted

__all__ = [
    "MSGPACK",
    "PLAIN",
    "CallsEncoder",
    "content_id",
    "decode",
    "encode",
    "get_calls_encoder",
    "get_encoder",
]

PLAIN = frozenset({MSGPACK, "msgpack", "application/json", "json", "application/x-yaml", "yaml"})
"""Content types and names of codecs that are not the project's, which may block or query the database."""
NAMES = {"msgpack": MSGPACK}
"""Short names of djqueue's own content types; kombu's registry has the names of the others."""


def encode(value: Any, content_type: str, *, limit: int | None = None, what: str = "payload") -> bytes:
    """Encode a value.

    Args:
        limit: Maximum number of bytes.
        what: Name of the value in error messages.

    Raises:
        SerializationError: A part of the value cannot be encoded; the message has its path. Or the content
            type requires kombu, which is not installed.
        PayloadTooLargeError: The value has more bytes than `limit`.
    """
    return get_encoder(content_type, limit, what)(value)


def get_encoder(content_type: str, limit: int | None = None, what: str = "payload") -> Callable[[Any], bytes]:
    """Return an encoder like `encode`, for many values. It may be called from any thread."""
    if NAMES.get(content_type, content_type) == MSGPACK:
        return msgpack.encoder(limit, what)
    from . import registry

    return registry.encoder(content_type, limit, what)


def get_calls_encoder(content_type: str, limit: int | None = None, what: str = "payload") -> CallsEncoder:
    """Return an encoder of many calls, which returns what `get_encoder`'s returns for each.

    It takes the positional arguments of each call and the named ones, and encodes the payloads
    `{"args": [...], "kwargs": {...}}`.
    """
    if NAMES.get(content_type, content_type) == MSGPACK:
        return msgpack.calls_encoder(limit, what)
    encode_one = get_encoder(content_type, limit, what)
    return lambda args, kwargs: [
        encode_one({"args": [*a], "kwargs": {**k}}) for a, k in zip(args, kwargs, strict=True)
    ]


def decode(
    data: bytes | bytearray | memoryview,
    content_type: str,
    *,
    accept: Collection[str] | None = None,
) -> Any:
    """Decode a value.

    Args:
        accept: Content types or names that may be decoded; by default MessagePack and those in
            DJQUEUE["ACCEPT_CONTENT"].

    Raises:
        SerializationError: The content type is not accepted, or the bytes are malformed.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise SerializationError(f"expected bytes to decode, got {type(data).__name__}")
    if NAMES.get(content_type, content_type) != MSGPACK:
        from . import registry

        return registry.decode(bytes(data), content_type, accept)
    if accept is not None and MSGPACK not in accept and "msgpack" not in accept:
        raise not_accepted(content_type, accept)
    return msgpack.decode(bytes(data))


def content_id(value: Any) -> str:
    """Return an id derived from a value: equal values have equal ids, regardless of the order of their
    keys.

    It is the first 16 hexadecimal digits of the SHA-256 of the value's JSON text, with sorted keys and
    without whitespace.
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        data = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SerializationError(
            f"the id cannot be derived from the payload, because the payload is not a JSON value: {error}"
        ) from error
    return hashlib.sha256(data).hexdigest()[:16]
