"""The language of the docs and the package: standard terms, and sentences that name their subject."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests import texts
from tests.docs.pages import FENCE, PAGES
from tools import messages

SOURCES = (messages.ROOT / "djqueue", messages.ROOT / "templates")

HOUSE_WORDS = re.compile(
    r"\b(bells?|desks?|crew|deeds?|tellers?|stations?|upkeep|ticked|hung up on|stands still|"
    r"(?:is|are|was|were) (?:said|told) to)\b",
    re.IGNORECASE,
)
"""Words that had a meaning in this project alone, and turns of phrase that hide who does what."""
OPENING = re.compile(
    r"(?:^|(?<=[.:;!] ))(?:What|Those|Of|Whether|Who|Somebody|Anybody)\b[^.?!\n|]*[.\n|]", re.MULTILINE
)
"""Sentences, not questions, that open with a clause in place of their subject."""
ALLOWED = {
    "docs/flows.md": {"What remains if an enqueue is interrupted depends on the storage:\n"},
}

MORE_HOUSE_WORDS = re.compile(
    r"\b(nobody|somebody|anybody|said|told|tells? of|(?<!dead )(?<!dead-)letters?|on (?:its|their) way|"
    r"expected a text|is not known; there (?:is|are)|jobs about it)\b",
    re.IGNORECASE,
)
"""More of them, which the docs may use in prose, but no text in the package."""
DOCSTRING_OPENING = re.compile(
    r"\A(?:What|Those|Of|Who|Somebody|Anybody|Have|Say|How|As|One who)\b[^\n?]*(?:\n|\Z)"
)
FUNCTION_OPENING = re.compile(rf"\AWhether\b[^\n]*|{DOCSTRING_OPENING.pattern}")
"""A function returns whether something holds; only a value may be described by "Whether ..."."""
OPENINGS = {"docstring": DOCSTRING_OPENING, "function": FUNCTION_OPENING}
TWIN = re.compile(r"\ASee `[^`]+`\.?\Z")
"""A docstring that only points elsewhere: on a twin write "Async version of `x`."."""
TEXT_ALLOWED: dict[str, set[str]] = {}
"""Uses that are right, by file."""


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "`…`", FENCE.sub("", text))


def test_docs_use_standard_terms_and_name_their_subjects(subtests) -> None:
    for page in PAGES:
        text = without_code(page.read_text(encoding="utf-8"))
        allowed = ALLOWED.get(str(page.relative_to(messages.ROOT)), set())
        found = {one.group(0) for pattern in (HOUSE_WORDS, OPENING) for one in pattern.finditer(text)}
        with subtests.test(page.name):
            assert found - allowed == set()
            assert allowed - found == set(), "not found any more: remove it from ALLOWED"


def findings(path: Path) -> Iterator[str]:
    """Yield what is wrong with a file's texts, one line each."""
    name = path.relative_to(messages.ROOT).as_posix()
    extract = texts.in_python if path.suffix == ".py" else texts.in_template
    for text in extract(path):
        plain = without_code(text.text).strip()
        found = [match[0] for pattern in (HOUSE_WORDS, MORE_HOUSE_WORDS) for match in pattern.finditer(plain)]
        if TWIN.match(text.text.strip()):
            found.append(text.text.strip())
        elif match := OPENINGS.get(text.kind, OPENING).search(plain):
            found.append(match[0].strip())
        for one in found:
            if one not in TEXT_ALLOWED.get(name, ()):
                yield f"{name}:{text.line}: {text.kind}: {one}"


def source_files(root: Path) -> list[Path]:
    """Return the files below a path, or the file itself, that have texts to check."""
    files = [root] if root.is_file() else [one for one in root.rglob("*") if one.is_file()]
    return sorted(
        one for one in files if one.suffix in (".py", ".html", ".txt") and "migrations" not in one.parts
    )


def test_texts_of_the_package_use_standard_terms_and_name_their_subjects() -> None:
    files = [path for root in SOURCES for path in source_files(root)]
    found = [one for path in files for one in findings(path)]

    assert found == []


def test_docstrings_errors_log_lines_and_labels_are_extracted(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(
        '"""Module."""\n'
        "LIMIT = 1\n"
        '"""Attribute."""\n'
        "def check(name):\n"
        '    """Function."""\n'
        '    logger.info("Log of %s.", name)\n'
        '    label = gettext("Label")\n'
        '    raise OptionError(f"{name}: wrong " "value")\n'
    )

    assert sorted((one.kind, one.text) for one in texts.in_python(path)) == [
        ("docstring", "Attribute."),
        ("docstring", "Module."),
        ("error", "…: wrong value"),
        ("function", "Function."),
        ("label", "Label"),
        ("log", "Log of %s."),
    ]
