"""Read the settings that are dicts of one feature: the dashboard, health, backups and monitoring."""

from os import PathLike, fspath
from pathlib import Path
from typing import Any

from djqueue.core.errors import ConfigurationError
from djqueue.core.messages import kind_of
from djqueue.core.units import milliseconds

from .checked import flag, lasting, mapping, positive
from .values import BackupSettings, DashboardSettings, HealthSettings, MonitoringSettings

TOKEN_FORM = "a text of at least 16 printable ASCII characters without spaces"  # noqa: S105 - no token


def is_token(value: Any) -> bool:
    """Return whether a value can be sent as a bearer token, and is hard to guess."""
    return isinstance(value, str) and len(value) >= 16 and all("!" <= one <= "~" for one in value)


def dashboard(key: str, value: Any) -> dict[str, Any]:
    given = mapping(value, {"READ_ONLY", "QUEUE_FILTER", "POLL", "SSE", "REDACT"})
    fields: dict[str, Any] = {}
    if "READ_ONLY" in given:
        fields["read_only"] = flag(given["READ_ONLY"], "READ_ONLY ")
    chosen = given.get("QUEUE_FILTER")
    if chosen is not None:
        if not callable(chosen) and not (isinstance(chosen, str) and "." in chosen):
            raise ConfigurationError(
                f"QUEUE_FILTER must be a function or the dotted path of one; got {chosen!r}"
            )
        fields["queue_filter"] = chosen
    if "SSE" in given:
        fields["sse"] = flag(given["SSE"], "SSE ")
    if "POLL" in given:
        fields["poll"] = milliseconds("POLL", given["POLL"])
    if "REDACT" in given:
        words = given["REDACT"]
        if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
            raise ConfigurationError(f"REDACT must be a list of words; got {words!r}")
        fields["redact"] = tuple(word.lower() for word in words)
    return {key.lower(): DashboardSettings(**fields)}


def health(key: str, value: Any) -> dict[str, Any]:
    given = mapping(value, {"MAX_WAIT", "LEASE_GRACE", "TIMEOUT"})
    return {
        key.lower(): HealthSettings(**{word.lower(): lasting(time, word) for word, time in given.items()})
    }


def backup(key: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {key.lower(): BackupSettings(every=None, is_every_given=True)}
    given = mapping(value, {"EVERY", "KEEP", "FOLDER", "TIMEOUT"})
    fields: dict[str, Any] = {}
    if "EVERY" in given:
        every = given["EVERY"]
        fields["every"] = None if every is None else lasting(every, "EVERY")
        fields["is_every_given"] = True
    if "KEEP" in given:
        fields["keep"] = positive(given["KEEP"], "KEEP")
    if "TIMEOUT" in given:
        fields["timeout"] = lasting(given["TIMEOUT"], "TIMEOUT")
    folder = given.get("FOLDER")
    if folder is not None:
        if not isinstance(folder, (str, Path)) or not Path(folder).is_absolute():
            raise ConfigurationError(f"FOLDER must be an absolute path; got {folder!r}")
        fields["folder"] = str(folder)
    return {key.lower(): BackupSettings(**fields)}


def monitoring(key: str, value: Any) -> dict[str, Any]:
    given = mapping(value, {"TOKEN", "TOKEN_FILE", "PUBLIC"})
    token, path = given.get("TOKEN"), given.get("TOKEN_FILE")
    if token is not None and path is not None:
        raise ConfigurationError("TOKEN and TOKEN_FILE exclude each other: remove one of them")
    if token is not None and not is_token(token):
        # The message must not show it.
        raise ConfigurationError(f"TOKEN must be {TOKEN_FORM}; got {kind_of(token)}")
    if path is not None and not isinstance(path, (str, PathLike)):
        raise ConfigurationError(f"TOKEN_FILE must be the path of a file; got {kind_of(path)}")
    public = flag(given.get("PUBLIC", False), "PUBLIC ")
    file = None if path is None else str(fspath(path))
    return {key.lower(): MonitoringSettings(token=token, token_file=file, public=public)}
