"""The pictures: where they lie, what they are called, and when a new one takes an old one's place."""

import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageChops

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "_static" / "screenshots"
COLOURS = 128
LARGEST = 100_000
"""Bytes of one picture."""
CHANGED = 0.02
"""Part of a picture that differs when it shows something else, and not only other times and ids."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A window, in which pages are looked at."""

    scheme: str
    width: int
    longest: int
    """Pixels of a page that is shown: the others are below them."""

    def path(self, page: str) -> Path:
        narrow = "-phone" if self.width < 768 else ""
        return FOLDER / f"{page}-{self.scheme}{narrow}.webp"


DESKTOP = (Shape("light", 1280, 1100), Shape("dark", 1280, 1100))
PHONE = (Shape("light", 390, 1300), Shape("dark", 390, 1300))
ON_PHONES = ("status", "queues", "job-waiting")
"""Pages that are shown at a phone's width, too."""


def shapes(page: str) -> tuple[Shape, ...]:
    """The pictures that a page has."""
    return (*DESKTOP, *PHONE) if page in ON_PHONES else DESKTOP


def save(png: bytes, path: Path) -> bool:
    """Keep a picture, small; not if it differs from the one that is there by times and ids alone."""
    with Image.open(io.BytesIO(png)) as taken:
        new = taken.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).convert("RGB")
    if path.exists():
        with Image.open(path) as old:
            if difference(old.convert("RGB"), new) < CHANGED:
                return False
    path.parent.mkdir(parents=True, exist_ok=True)
    new.save(path, lossless=True, quality=100, method=3)
    return True


def difference(old: Image.Image, new: Image.Image) -> float:
    """The part of their pixels that differs, of 0 to 1; pictures of other sizes differ wholly."""
    if old.size != new.size:
        return 1.0
    counts = ImageChops.difference(old.convert("L"), new.convert("L")).histogram()
    return sum(counts[32:]) / sum(counts)
