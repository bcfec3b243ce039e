"""Screenshots in the docs: every page of the navigation, in light and dark, small and described."""

import re

from PIL import Image

from djqueue.dashboard.urls import PAGES
from tools.screenshots.pictures import FOLDER, LARGEST, difference, save, shapes

from .pages import ROOT

TEXT = "".join((ROOT / "docs" / page).read_text() for page in ("dashboard.md", "spark.md"))
SHOWN = re.findall(r'<img alt="([^"]*)" src="_static/screenshots/([\w-]+)-light(-phone)?\.webp"', TEXT)
NAVIGATION = [page.name for page in PAGES if page.label]
ALL = 4_000_000
"""Bytes of all pictures."""
HOW = """<picture>
<source media="(prefers-color-scheme: dark)" srcset="_static/screenshots/{0}-dark.webp">
<img alt="What is to be seen" src="_static/screenshots/{0}-light.webp" width="1280">
</picture>"""


def test_every_page_of_the_navigation_has_screenshots():
    paths = [shape.path(name) for name in NAVIGATION for shape in shapes(name)]

    assert [path.name for path in paths if not path.is_file()] == [], "run `make screenshots`"


def test_every_page_of_the_navigation_is_shown_in_the_docs():
    missing = set(NAVIGATION) - {name for _alt, name, _phone in SHOWN}

    assert not missing, HOW.format(min(missing))


def test_shown_screenshots_exist_in_light_and_dark_with_descriptions():
    assert len(SHOWN) == TEXT.count("<picture>") > 0
    for alt, name, phone in SHOWN:
        assert len(alt) > 20, name
        dark = f"{name}-dark{phone}.webp"
        assert f'media="(prefers-color-scheme: dark)" srcset="_static/screenshots/{dark}"' in TEXT
        assert (FOLDER / dark).is_file()
        assert (FOLDER / f"{name}-light{phone}.webp").is_file()


def test_screenshots_are_small_and_all_are_used():
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert [name for name, size in sizes.items() if size > LARGEST] == []
    assert sum(sizes.values()) < ALL
    assert [name for name in sizes if f"_static/screenshots/{name}" not in TEXT] == []


# Replacement.


def png(tmp_path, colour, spot=0):
    path = tmp_path / "taken.png"
    image = Image.new("RGB", (400, 400), colour)
    image.paste("black", (0, 0, spot, spot))
    image.save(path)
    return path.read_bytes()


def test_screenshot_is_replaced_only_by_a_visible_change(tmp_path):
    path = tmp_path / "folder" / "page.webp"
    assert save(png(tmp_path, "white"), path)
    before = path.read_bytes()
    assert not save(png(tmp_path, "white", spot=40), path)
    assert path.read_bytes() == before
    assert save(png(tmp_path, "white", spot=200), path)
    assert path.read_bytes() != before


def test_images_of_different_sizes_differ():
    assert difference(Image.new("RGB", (3, 3)), Image.new("RGB", (3, 4))) == 1.0
