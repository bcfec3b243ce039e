"""A process that publishes staged chunks one by one: `python -m tests.storage.database.publisher`."""

import os
from contextlib import closing

import django


def say(word: object) -> None:
    # One write: it is read whole or not at all, whenever this process dies.
    os.write(1, f"{word}\n".encode())


def main() -> None:
    """Publish `MANIFEST`, and print a line after each chunk."""
    django.setup()
    from djqueue.storage.database import DatabaseStorage
    from djqueue.storage.staging import chunks_of

    from .test_staging import MANIFEST

    with closing(DatabaseStorage()) as storage:
        staging = storage.capabilities.staging
        found = staging.begin(MANIFEST, None)
        say("ready")
        for chunk in chunks_of(found.manifest):
            say(staging.publish(found.manifest, [chunk])[0].queued)
        staging.end(found.manifest)


if __name__ == "__main__":
    main()
