"""The number of attempts that count toward `--max-jobs`, in memory that outlives a worker process."""

import mmap
import struct

_NUMBER = struct.Struct("<q")


class AttemptCount:
    """A number that a worker process writes, and the one that replaces it reads.

    Create it in the process that forks both.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NUMBER.size)

    def read(self) -> int:
        """Return the number."""
        number: int = _NUMBER.unpack_from(self._memory)[0]
        return number

    def write(self, number: int) -> None:
        """Replace the number. Call this before the handlers start, because they may crash the process."""
        _NUMBER.pack_into(self._memory, 0, number)
