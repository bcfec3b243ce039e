"""Jobs that an archive has are forgotten in the storage: those alone, and only as they were archived."""

from collections import Counter
from typing import TYPE_CHECKING

from djqueue.core.states import TERMINAL
from djqueue.storage.base import Storage

from .archive import rows_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

AT_ONCE = 500


def purge(storage: Storage, jobs: "DataFrame") -> Counter[str]:
    """Remove jobs, named by queue, id and finished_at; says how many were removed, changed or gone.

    jobs: as they were read back from the files of an archive: see `archive.written`.

    A job that is not there as it was archived, as somebody has retried it meanwhile, is left alone: changed.
    """
    done: Counter[str] = Counter()
    for some in rows_of(jobs, AT_ONCE):
        queue = some[0][0]
        records = storage.reads.jobs(queue, [id for _, id, _ in some])
        same = []
        last = 0
        for (_, id, at), record in zip(some, records, strict=True):
            if record is None:
                done["gone"] += 1
            elif record.state not in TERMINAL or record.finished_at != at:
                done["changed"] += 1
            else:
                same.append(id)
                last = max(last, at)
        # One that was retried since that look has not ended, or later.
        removed = storage.jobs.remove(queue, same, ended_before=last + 1) if same else []
        done["removed"] += sum(removed)
        done["changed"] += len(removed) - sum(removed)
    return done
