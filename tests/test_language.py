"""The language of docs and pages: standard terms, and sentences that name their subject."""

import re
from pathlib import Path

import pytest

from tests import messages
from tests.docs.pages import FENCE, PAGES

NOT_PUBLISHED = {"checklist.md"}
PROSE = [page for page in PAGES if page.name not in NOT_PUBLISHED]

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
    "docs/testing.md": {"stands still"},  # a clock does
    "docs/flows.md": {"What remains if an enqueue is interrupted depends on the storage:\n"},
}


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "`…`", FENCE.sub("", text))


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_a_page_has_no_house_words_and_names_its_subjects(page: Path) -> None:
    text = without_code(page.read_text(encoding="utf-8"))
    allowed = ALLOWED.get(str(page.relative_to(messages.ROOT)), set())
    found = {one.group(0) for pattern in (HOUSE_WORDS, OPENING) for one in pattern.finditer(text)}

    assert found - allowed == set()
    assert allowed - found == set(), "no longer there: take it out of the list"
