"""The codecs of kombu's serialization registry, as far as they are accepted."""

from collections.abc import Callable, Collection
from typing import Any

from djqueue.conf import get_settings
from djqueue.core.errors import SerializationError
from djqueue.core.logs import text_of, type_name
from djqueue.core.messages import kind_of

from .refusals import not_accepted, too_large

try:
    from kombu import serialization
    from kombu.exceptions import SerializerNotInstalled
except ModuleNotFoundError as error:
    if error.name != "kombu":
        raise
    raise SerializationError(
        'encodings other than the default, such as JSON, require kombu: run `pip install "djqueue[kombu]"`'
    ) from None

registry: Any = serialization.registry
"""kombu has no type hints."""
LONGEST_REASON = 200
"""Characters of a foreign error that are shown: some of them quote the value."""


def encoder(content_type: str, limit: int | None, what: str) -> Callable[[Any], bytes]:
    """Return an encoder: see `djqueue.codecs.get_encoder`."""
    name = _accepted(content_type, None)

    def encode(value: Any) -> bytes:
        try:
            _, encoding, text = registry.dumps(value, serializer=name)
            if not isinstance(text, (str, bytes)):
                raise TypeError(f"the codec returned {kind_of(text)} instead of str or bytes")
            data = text if isinstance(text, bytes) else text.encode(encoding)
        except Exception as error:
            raise _wrapped(error, f"{what}: cannot be encoded as {name}") from error
        if limit is not None and len(data) > limit:
            raise too_large(len(data), limit, what)
        return data

    return encode


def decode(data: bytes, content_type: str, accept: Collection[str] | None) -> Any:
    """Decode a value: see `djqueue.codecs.decode`."""
    name = _accepted(content_type, accept)
    if not data:
        # kombu gives nothing back for nothing, but no codec encodes a value so.
        raise SerializationError(f"not a value encoded as {name}: the data is empty")
    kind = registry.name_to_type[name]
    try:
        return registry.loads(data, kind, None, accept={kind})
    except Exception as error:
        raise _wrapped(error, f"not a value encoded as {name}") from error


def _accepted(content_type: str, accept: Collection[str] | None) -> str:
    """kombu's name of a content type (or name) that is known and accepted."""
    if accept is None:
        accept = get_settings().accept_content
    kind = _content_type(content_type)
    if kind not in registry.type_to_name or kind not in {_content_type(entry) for entry in accept}:
        raise not_accepted(content_type, accept)
    name: str = registry.type_to_name[kind]
    return name


def _content_type(name: str) -> str:
    found: str = registry.name_to_type.get(name, name)
    return found


def _wrapped(error: Exception, text: str) -> SerializationError:
    if isinstance(error, SerializerNotInstalled):
        return SerializationError(f"{text}: {error}")
    reason = text_of(error, lambda found: found.strip().partition("\n")[0][:LONGEST_REASON])
    # kombu raises an error of its own while it handles that of the codec.
    return SerializationError(f"{text}: {reason or type_name(error.__context__ or error)}")
