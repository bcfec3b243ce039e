"""Turn a caller's options and payloads into a batch for the storage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from django.apps import apps

from djqueue.codecs import CallsEncoder, encode, get_calls_encoder, get_encoder
from djqueue.conf import Settings, get_settings, has_django
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import ConfigurationError, OptionError, PayloadTooLargeError, UnknownQueueError
from djqueue.core.headers import NO_HEADERS
from djqueue.core.ids import IdSource
from djqueue.core.job import Batch
from djqueue.core.options import (
    MSGPACK,
    EnqueueOptions,
    JobOptions,
    check_dependencies,
    check_text,
    parse_options,
)
from djqueue.core.suggest import nearest
from djqueue.middleware import layers_of

DEFAULT_QUEUE = "default"
ROOM_FOR_OPTIONS = 8 * 1024
"""Upper bound, in bytes, of a job's encoded options without tags, headers and dependencies."""

_id_source = IdSource()


def resolve(given: Mapping[str, Any], queue: str | None = None) -> EnqueueOptions:
    """Return a caller's options, checked, with the settings' defaults and the queue."""
    settings = get_settings()
    try:
        return _resolved(tuple((key, type(value), value) for key, value in given.items()), queue, settings)
    except TypeError:  # a value that cannot be hashed
        return _resolve(given, queue, settings)


def check(given: Mapping[str, Any], queue: str | None = None) -> None:
    """Check the options of a job type or a queue where it is declared.

    A wrong setting must not fail here: `manage.py check` reports it (E001), which requires that the project's
    modules can be imported. For the same reason, a queue that STRICT_QUEUES refuses is left to the system
    check (E009) and to the enqueue while Django starts.

    Raises OptionError, UnknownQueueError.
    """
    try:
        resolve(given, queue)
    except ConfigurationError:
        _resolve(given, queue, Settings())
    except UnknownQueueError:
        if not has_django() or apps.ready:
            raise


@lru_cache(maxsize=256)
def _resolved(
    given: tuple[tuple[str, type, Any], ...], queue: str | None, settings: Settings
) -> EnqueueOptions:
    """Resolve options that can be hashed. They repeat, and checking them takes longer than the rest."""
    return _resolve({key: value for key, _, value in given}, queue, settings)


def _resolve(given: Mapping[str, Any], queue: str | None, settings: Settings) -> EnqueueOptions:
    if "batch" in given:
        raise OptionError("batch: set the option on the job type: @job(batch=...)")
    if callable(given.get("backoff")):
        raise OptionError("backoff: a backoff function must be set on the job type: @job(backoff=...)")
    options = parse_options(given, _base(settings))
    if "backoff" in given:
        options = replace(options, job=replace(options.job, backoff_given=True))
    name = options.queue or queue or DEFAULT_QUEUE
    check_queue(name, settings)
    if options.queue == name:
        return options
    return parse_options({"queue": name}, options)


def queue_of(declared: str | None, settings: Settings) -> str:
    """Return the queue of a job type: the declared one, or else the default of the settings."""
    return declared or settings.defaults.queue or DEFAULT_QUEUE


def check_queue(name: str, settings: Settings) -> None:
    """Raise UnknownQueueError if the settings close the list of queues and this is not on it."""
    if settings.strict_queues and name not in settings.queues:
        raise UnknownQueueError(
            f"queue {name!r} is not in DJQUEUE['QUEUES'], and STRICT_QUEUES is "
            f"on{nearest(name, settings.queues)}"
        )


def batch(
    options: EnqueueOptions, name: str, values: Sequence[Any], ids: Sequence[str] | None = None
) -> Batch:
    """Return a batch for the storage, with encoded payloads and checked ids."""
    encode_payload = encoder(options.job.content_type, get_settings())
    ids = _checked_ids(ids, len(values))
    return _batch(options, name, [encode_payload(value) for value in values], ids)


def batch_of_calls(
    options: EnqueueOptions,
    name: str,
    args: Sequence[Sequence[Any]],
    kwargs: Sequence[Mapping[str, Any]],
    ids: Sequence[str] | None = None,
) -> Batch:
    """Return a batch of calls of a function, given the positional and the named arguments of each."""
    encode_calls = calls_encoder(options.job.content_type, get_settings())
    ids = _checked_ids(ids, len(args))
    return _batch(options, name, encode_calls(args, kwargs), ids)


def with_ids(batch: Batch) -> Batch:
    """Return the batch with ids, to wait for or to name its jobs before they are enqueued."""
    if batch.ids is not None:
        return batch
    # A middleware may pass the batch more than once.
    fresh = not layers_of(get_settings()).enqueue
    return batch._replace(ids=_id_source.many(len(batch.payloads), SYSTEM_CLOCK.now()), fresh=fresh)


def _checked_ids(ids: Sequence[str] | None, count: int) -> list[str] | None:
    if ids is None:
        return None
    if len(ids) != count:
        raise OptionError(f"ids: expected one id per job ({count}), got {len(ids)}")
    return [check_text("id", job_id) for job_id in ids]


def _batch(options: EnqueueOptions, name: str, payloads: list[bytes], ids: list[str] | None) -> Batch:
    assert options.queue is not None
    check_size(options.job, name, payloads)
    return Batch(
        options.queue,
        check_text("name", name),
        options.job,
        payloads,
        ids,
        options.delay,
        options.run_at,
    )


def check_size(options: JobOptions, name: str, payloads: Sequence[bytes]) -> None:
    """Raise PayloadTooLargeError if a job's payload and its encoded options are too large together."""
    limit = get_settings().max_payload
    payload = max(map(len, payloads), default=0)
    varied = options.tags or options.depends_on or options.headers
    if not varied and payload + ROOM_FOR_OPTIONS <= limit:
        return
    check_dependencies("depends_on", options.depends_on)
    size = _size_of(options)
    if payload + size <= limit:
        return
    parts = {
        "payload": payload,
        "tags": size - _size_of(replace(options, tags=())),
        "headers": size - _size_of(replace(options, headers=NO_HEADERS)),
        "depends_on": size - _size_of(replace(options, depends_on=())),
    }
    parts["other options"] = payload + size - sum(parts.values())
    listed = ", ".join(f"{part} {count}" for part, count in parts.items() if count)
    raise PayloadTooLargeError(
        f'job {name!r}: {payload + size} bytes ({listed}), but DJQUEUE["MAX_PAYLOAD"] allows {limit} for '
        "the payload and the options together"
    )


def _size_of(options: JobOptions) -> int:
    fields = options.as_dict()
    return len(encode(fields, MSGPACK)) if fields else 0


@lru_cache(maxsize=64)
def encoder(content_type: str, settings: Settings) -> Callable[[Any], bytes]:
    """Return the encoder of payloads of a content type, with the settings' limits."""
    _check_content_type(content_type, settings)
    return get_encoder(content_type, settings.max_payload, "payload")


@lru_cache(maxsize=64)
def calls_encoder(content_type: str, settings: Settings) -> CallsEncoder:
    """Return the encoder of many calls: see `encoder`."""
    _check_content_type(content_type, settings)
    return get_calls_encoder(content_type, settings.max_payload, "payload")


def _check_content_type(content_type: str, settings: Settings) -> None:
    if content_type not in settings.accept_content:
        accepted = ", ".join(sorted(settings.accept_content))
        raise OptionError(f"content_type: {content_type!r} is not in DJQUEUE['ACCEPT_CONTENT'] ({accepted})")


def _base(settings: Settings) -> EnqueueOptions:
    """Return the options of jobs for which neither the job type nor the caller sets any."""
    given: dict[str, Any] = {}
    if settings.defaults.job.content_type != settings.codec:
        given["content_type"] = settings.codec
    if settings.enqueue_on_commit:
        given["enqueue_on_commit"] = settings.enqueue_on_commit
    return parse_options(given, settings.defaults) if given else settings.defaults
