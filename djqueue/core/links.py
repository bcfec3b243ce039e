"""How the engine's jobs are connected, for `explore`."""

from collections.abc import Iterable

from .base import EngineBase
from .graph import FlowNode, JobLink, link
from .job import EngineJob
from .options import JobKey


class Linking(EngineBase):
    """Reads of single jobs and of what waits for them."""

    def links(self, keys: Iterable[JobKey], most: int) -> dict[JobKey, JobLink]:
        """Those of these jobs that are here, each as it is when it is looked at.

        most: dependents of a job that are told.
        """
        found = {}
        for key in keys:
            shard = self.shard(key[0])
            with shard.lock:
                job = shard.find(key[0]).jobs.get(key[1])
                if job is not None:
                    waiting = shard.dependencies.known(key, most)
                    found[key] = link(node_of(job), job.options, waiting)
        return found

    def dependents(self, key: JobKey, most: int) -> list[JobKey]:
        """Live jobs that depend on one, whether its own record is here or elsewhere."""
        shard = self.shard(key[0])
        with shard.lock:
            return shard.dependencies.known(key, most)


def node_of(job: EngineJob) -> FlowNode:
    """A job as a node of a graph."""
    return FlowNode(
        job.queue,
        job.id,
        job.name,
        job.state,
        job.reason,
        created_at=job.created_at,
        finished_at=job.finished_at,
    )
