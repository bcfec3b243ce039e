"""Jobs in the memory of one scheduler process, which keeps the project's tables up to date."""

from .storage import SchedulerStorage as SchedulerStorage
