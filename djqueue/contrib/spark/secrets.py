"""Resolve URLs that refer to a secret, in each process, so that no plan, log or command line shows it."""

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from djqueue.core.errors import OptionError

ENVIRONMENT, FILE = "env:", "file:"
REFERENCES = {"env": "the name of an environment variable", "file": "the path of a file"}
REMEDY = (
    "use url=env:NAME, an environment variable of the driver and the executors, or url=file:/path, a file on "
    "their machines"
)


def resolved(url: str) -> str:
    """Return a URL, or the one that an environment variable (`env:NAME`) or a file (`file:/path`) has.

    Raises:
        OptionError: This process lacks the variable or the file.
    """
    if url.startswith((ENVIRONMENT, FILE)) and "://" in url.partition(":")[2]:
        # Don't echo the URL: it may contain a password.
        kind = url.partition(":")[0]
        raise OptionError(
            f"url: {kind}: is followed by a URL; expected {REFERENCES[kind]}: remove {kind}:, or {REMEDY}"
        )
    if url in (ENVIRONMENT, FILE):
        raise OptionError(f"url: {url} is incomplete; expected {REFERENCES[url[:-1]]}")
    if url.startswith(ENVIRONMENT):
        name = url.removeprefix(ENVIRONMENT)
        found = os.environ.get(name, "").strip()
        if not found:
            raise OptionError(
                f"url: {url}: the environment variable {name!r} is not set in process {os.getpid()} on "
                f"{socket.gethostname()}: set it for the driver and for all executors, before Spark starts"
            )
    elif url.startswith(FILE):
        path = Path(url.removeprefix(FILE).replace("//", "", 1) if url.startswith("file://") else url[5:])
        try:
            found = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(
                f"url: {url}: process {os.getpid()} on {socket.gethostname()} cannot read the file: {error}"
            ) from None
        if not found:
            raise OptionError(f"url: {url}: the file is empty; expected a URL")
    else:
        return url
    if found.startswith((ENVIRONMENT, FILE)):
        raise OptionError(f"url: {url}: has another reference; expected a URL such as redis://…")
    return found


def has_password(url: str) -> bool:
    """Return whether a URL itself has a password."""
    if url.startswith((ENVIRONMENT, FILE)):
        return False
    authority, at, _ = url.partition("://")[2].rpartition("@")
    if at and ":" in authority:
        return True
    try:
        query = urlsplit(url).query
    except ValueError:
        return False
    return "password=" in query.lower()
