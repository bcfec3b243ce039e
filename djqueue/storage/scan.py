"""Count the values in a MessagePack frame before decoding it.

MessagePack values are consecutive: a list is its length followed by its items, so one loop over the type
bytes counts them all. The bodies of extension types are scanned as frames, which may count too many values
but never too few.
"""

from struct import unpack_from

FIXED = {
    0xC0: 0,
    0xC1: 0,
    0xC2: 0,
    0xC3: 0,
    0xCA: 4,
    0xCB: 8,
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
    # The items of arrays and maps are values of their own.
    0xDC: 2,
    0xDD: 4,
    0xDE: 2,
    0xDF: 4,
}
SIZED = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
WIDTHS = {">B": 1, ">H": 2, ">I": 4}
FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
EXTENSIONS = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}


def _skips() -> list[int]:
    """Return, for each type byte, the number of bytes to the next value; negative if it needs decoding."""
    skips = []
    for head in range(256):
        if 0xA0 <= head <= 0xBF:
            skips.append(1 + (head & 0x1F))
        elif head in FIXED:
            skips.append(1 + FIXED[head])
        elif head in SIZED or head in FIXED_EXTENSIONS or head in EXTENSIONS:
            skips.append(-1)
        else:
            skips.append(1)
    return skips


SKIPS = _skips()


def has_more_values(body: bytes, limit: int) -> bool:
    """Return whether a frame's body may hold more than `limit` values. Never reads more than that many."""
    if len(body) <= limit:
        return False  # A value has at least one byte.
    skips = SKIPS
    place, end, count = 0, len(body), 0
    ends: list[int] = []
    """Ends of the enclosing extensions, the innermost last."""
    while count <= limit:
        if place >= end:
            if not ends:
                return False
            # A body that isn't MessagePack must not hide the values after it.
            place, end = end, ends.pop()
            continue
        count += 1
        head = body[place]
        skip = skips[head]
        if skip > 0:
            place += skip
        elif place + 6 > len(body):
            return False  # At most five more values.
        elif (form := SIZED.get(head)) is not None:
            [size] = unpack_from(form, body, place + 1)
            place += 1 + WIDTHS[form] + size
        else:
            form = EXTENSIONS.get(head)
            if form is None:
                size, width = FIXED_EXTENSIONS[head], 0
            else:
                [size] = unpack_from(form, body, place + 1)
                width = WIDTHS[form]
            place += 2 + width
            ends.append(end)
            end = min(place + size, end)
    return True
