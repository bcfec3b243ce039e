"""Make the URL scheme `djqueue` known to kombu.

kombu has no entry point for transports, but it loads the entry points of serializers when it is first
imported. This module is one of them: it registers the codec of djqueue as the serializer `djqueue`, and adds
the transport to kombu's aliases. It must import nothing that is slow.
"""

from typing import Any

from kombu.transport import TRANSPORT_ALIASES

CONTENT_TYPE = "application/x-djqueue-msgpack"

TRANSPORT_ALIASES.setdefault("djqueue", "djqueue.contrib.celery.transport:Transport")


def encode(value: Any) -> bytes:
    """Encode a value with djqueue's MessagePack codec."""
    from djqueue.codecs import get_encoder

    encoded: bytes = get_encoder(CONTENT_TYPE)(value)
    return encoded


def decode(data: bytes) -> Any:
    """Decode a value of djqueue's MessagePack codec."""
    from djqueue.codecs import decode as decode_value

    return decode_value(bytes(data), CONTENT_TYPE)


serializer = (encode, decode, CONTENT_TYPE, "binary")
"""Arguments of `kombu.serialization.register`."""
