"""Tracebacks without the frames of libraries."""

import re

FRAME = re.compile(r'  File "(?P<path>[^"]+)", line \d+')
LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python3[^/\\]*[/\\]|^<")
"""Paths of installed packages, of Python's own modules, and of frames without a file."""
CUT = "  …"


def of_the_app(text: str) -> str | None:
    """Return a traceback with only the application's frames; None if it has no others, or none."""
    shown: list[str] = []
    kept = cut = 0
    is_left_out = False
    for line in text.splitlines():
        frame = FRAME.match(line)
        if frame:
            is_left_out = bool(LIBRARY.search(frame["path"]))
            kept += not is_left_out
            cut += is_left_out
            if is_left_out and shown[-1:] != [CUT]:
                shown.append(CUT)
        elif not line.startswith("    "):
            is_left_out = False
        if not is_left_out:
            shown.append(line)
    return "\n".join(shown) if kept and cut else None
