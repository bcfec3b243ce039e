"""README.md and the pages of docs/, taken apart: fenced blocks, and tables that a comment names."""

import re
from dataclasses import dataclass
from pathlib import Path

from django.core.management import get_commands, load_command_class

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]

FENCE = re.compile(r"^```([a-z]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LABEL = "<!-- table: {} -->"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """Of its first line of text."""
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def heading(self) -> str:
        """The file that the block is from, where its first line is a comment that names one."""
        first = self.text.partition("\n")[0]
        found = re.match(r"# ([\w/]+\.py)", first)
        return found[1] if found else ""


def blocks(page: Path, *languages: str) -> list[Block]:
    """The page's blocks in these languages, in order."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start(2)) + 1, found[1], found[2])
        for found in FENCE.finditer(text)
        if found[1] in languages
    ]


def table(page: str, label: str) -> list[list[str]]:
    """The cells, without their backquotes, of the table behind `<!-- table: label -->`; no header."""
    text = (ROOT / "docs" / page).read_text()
    lines = text.split(LABEL.format(label) + "\n", 1)[1].splitlines()
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        rows.append([cell.strip().strip("`").replace("\\|", "|") for cell in cells])
    return rows[2:]


def first_cells(page: str, label: str) -> list[str]:
    """The first cell of each row: see `table`."""
    return [row[0] for row in table(page, label)]


def anchors(page: Path) -> set[str]:
    """Return the labels of a page, and the anchors of its headings."""
    text = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


def check_management_command(words: list[str]) -> None:
    """Fail if `manage.py` has no such command, or the command no such flags."""
    name, *arguments = words
    assert name in get_commands()
    load_command_class(get_commands()[name], name).create_parser("manage.py", name).parse_args(arguments)
