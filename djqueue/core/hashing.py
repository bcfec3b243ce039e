"""FNV-1a, which decides the shard of a queue."""

from functools import lru_cache

FNV_OFFSET_BASIS = 0x811C9DC5
FNV_PRIME = 0x01000193


@lru_cache(maxsize=4096)
def fnv1a32(text: str) -> int:
    """Return the 32-bit FNV-1a hash of a text's UTF-8 bytes, unsigned.

    Source: Fowler, Noll, Vo, http://www.isthe.com/chongo/tech/comp/fnv/
    """
    value = FNV_OFFSET_BASIS
    for byte in text.encode("utf-8", "surrogatepass"):
        value = ((value ^ byte) * FNV_PRIME) & 0xFFFFFFFF
    return value


def shard_count(cores: int | None) -> int:
    """Return the number of shards for a number of cores: a power of two, 4 to 64."""
    cores = cores or 4
    for limit, shards in ((4, 4), (8, 8), (16, 16), (32, 32)):
        if cores <= limit:
            return shards
    return 64
