"""docs/checklist.md has every row, and names tests that are there."""

import re
from string import ascii_lowercase

import pytest

from .pages import ROOT

PAGE = (ROOT / "docs" / "checklist.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| P?\d", line)
]
NUMBERS = [
    *(str(number) for number in range(1, 172)),
    *("171a", "171b", "171c", "171d"),
    *(str(number) for number in range(172, 177)),
    *(f"P{number}" for number in range(1, 11)),
]
TESTS = re.findall(r"`((?:tests|djqueue)/[\w/]+\.py)(?:::(\w+))?`", PAGE)


def test_there_is_a_row_for_each_number():
    own = {f"{number}{letter}" for number in NUMBERS for letter in ascii_lowercase} - set(NUMBERS)

    assert [row[0] for row in ROWS if row[0] not in own] == NUMBERS
    assert len({row[0] for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_is_there_is_shown_by_a_test(row):
    _number, words, state, _provided, test = row
    word = state.split(";")[0].split(":")[0].split(" ")[0]

    assert words
    assert word in {"done", "partly", "later", "not"}
    if word == "done" and "Roadmap" not in state:
        assert re.fullmatch(r"`[\w/]+\.py(::\w+)?`", test)


@pytest.mark.parametrize(("path", "name"), sorted(set(TESTS)), ids=str)
def test_a_test_that_is_named_exists(path, name):
    text = (ROOT / path).read_text()

    assert not name or re.search(rf"^ *(async )?(def|class) {name}\b", text, re.MULTILINE)
