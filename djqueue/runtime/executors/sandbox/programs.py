"""Files that the kernel opens to start a program, besides the program itself."""

import os
import struct

from .errors import PermissionPathError

ELF64 = b"\x7fELF\x02\x01"
"""First bytes of a little-endian 64-bit program."""
HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
SEGMENT = struct.Struct("<IIQQQQQQ")
INTERPRETER = 3
"""PT_INTERP: type of the segment that names the loader."""
MOST_SEGMENTS = 128
LONGEST_LINE = 256
"""Maximum number of bytes of a script's first line that the kernel reads."""


def loader_of(program: str) -> str | None:
    """Return the loader of a dynamic program, or None for a static one.

    Raises PermissionPathError if the file can't be read, or is neither a 64-bit program nor a script.
    """
    try:
        with open(program, "rb") as file:
            head = file.read(HEADER.size)
            if not head.startswith(ELF64) or len(head) < HEADER.size:
                if head.startswith(b"#!"):
                    return None
                raise PermissionPathError(f"run: {program} is neither a 64-bit program nor a script")
            _, _, _, _, offset, _, _, _, size, count, *_ = HEADER.unpack(head)
            if size != SEGMENT.size or count > MOST_SEGMENTS:
                raise PermissionPathError(f"run: {program} is not a valid program")
            for index in range(count):
                file.seek(offset + index * size)
                segment = file.read(size)
                if len(segment) < size:
                    break
                kind, _, where, _, _, length, *_ = SEGMENT.unpack(segment)
                if kind == INTERPRETER:
                    file.seek(where)
                    return os.fsdecode(file.read(min(length, 4_096)).rstrip(b"\0"))
    except OSError as error:
        raise PermissionPathError(f"run: {program} can't be read: {error.strerror}") from error
    return None


def interpreter_of(program: str) -> str | None:
    """Return the interpreter that the first line of a script names, or None for a program."""
    try:
        with open(program, "rb") as file:
            line = file.read(LONGEST_LINE).split(b"\n", 1)[0]
    except OSError as error:
        raise PermissionPathError(f"run: {program} can't be read: {error.strerror}") from error
    if not line.startswith(b"#!"):
        return None
    words = line[2:].split(None, 1)
    return os.fsdecode(words[0]) if words else None
