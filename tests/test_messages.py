"""Translations: catalogs are complete, and every text that users see is in them."""

import ast
import gettext
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tools import messages

ROOT = messages.ROOT
LANGUAGES = messages.languages()
TEMPLATES = sorted((ROOT / "templates").rglob("*.html"))
SURFACES = sorted(
    path
    for folder in ("admin", "dashboard", "models", "templatetags")
    for path in (ROOT / "djqueue" / folder).rglob("*.py")
) + [ROOT / "djqueue" / name for name in ("apps.py", "fields.py")]
"""Modules with words for people who look at pages."""
PLACEHOLDER = re.compile(r"%(?:\(\w+\))?[-#0 +]*[\d.]*[sdgif]|\{\w*\}")


# The catalogs.


@pytest.fixture(scope="module")
def extracted() -> Iterator[Path]:
    with messages.extracted(*LANGUAGES) as locale:
        yield locale


def test_dashboard_speaks_ten_languages_beside_english() -> None:
    assert LANGUAGES == ["de", "es", "fr", "it", "ja", "nl", "pl", "pt_BR", "uk", "zh_Hans"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_catalog_has_exactly_the_strings_in_the_code(language: str, extracted: Path) -> None:
    def found(locale: Path) -> set[tuple[str, ...]]:
        return {
            (one.fields.get("msgctxt", ""), one.id, one.fields.get("msgid_plural", ""))
            for one in messages.read(messages.catalogue(language, locale))
        }

    there, wanted = found(messages.LOCALE), found(extracted)
    assert (wanted - there, there - wanted) == (set(), set()), "run `make messages`"


@pytest.mark.parametrize("language", LANGUAGES)
def test_catalog_is_complete_and_has_no_fuzzy_entries(language: str) -> None:
    found = messages.read(messages.catalogue(language))
    assert [one.id for one in found if one.is_missing] == []
    assert len(found) > 500


@pytest.mark.parametrize("language", LANGUAGES)
def test_translations_have_the_placeholders_of_their_originals(language: str) -> None:
    for one in messages.read(messages.catalogue(language)):
        originals = [
            sorted(PLACEHOLDER.findall(one.fields[name]))
            for name in ("msgid", "msgid_plural")
            if name in one.fields
        ]
        for text in one.translations:
            assert sorted(PLACEHOLDER.findall(text)) in originals, one.id


@pytest.mark.parametrize("language", LANGUAGES)
def test_compiled_catalog_equals_its_source(language: str) -> None:
    po = messages.catalogue(language)
    with po.with_suffix(".mo").open("rb") as file:
        compiled = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
    compiled.pop("")
    wanted: dict[object, str] = {}
    for one in messages.read(po):
        key = f"{one.fields['msgctxt']}\x04{one.id}" if "msgctxt" in one.fields else one.id
        plural = "msgid_plural" in one.fields
        wanted |= {(key, at) if plural else key: text for at, text in enumerate(one.translations)}
    assert compiled == wanted, "run `make messages`"


# Texts in no catalog.

BARE = {"CSV", "JSON", "colM", "djq-page", "djqueue", "djqueue -", "(djqueue )djqueue"}
"""In templates, and the same in every language: names of formats, classes in blocks of the admin."""
SAID = ("title", "aria-label", "placeholder", "alt", "data-label")
"""Attributes that are read, or read out."""


class Words(HTMLParser):
    """Texts and read attributes of a template without its tags; code and keys do not count."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self._within: list[tuple[str, bool]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        is_code = tag in ("code", "kbd", "pre") or "djq-mono" in (dict(attrs).get("class") or "")
        self._within.append((tag, is_code))
        self.found += [
            value or "" for name, value in attrs if name in SAID or name.startswith("data-djq-word")
        ]

    def handle_endtag(self, tag: str) -> None:
        while self._within and self._within.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not any(is_code for _tag, is_code in self._within):
            self.found.append(data)


def test_templates_have_no_untranslated_text() -> None:
    found = {str(path.relative_to(ROOT)): untranslated(path) - BARE for path in TEMPLATES}

    assert {path: texts for path, texts in found.items() if texts} == {}


def untranslated(path: Path) -> set[str]:
    text = re.sub(
        r"\{% blocktranslate.*?%\}.*?\{% endblocktranslate %\}", "", path.read_text(), flags=re.DOTALL
    )
    text = re.sub(r"\{#.*?#\}|\{%.*?%\}|\{\{.*?\}\}", "", text, flags=re.DOTALL)
    bare = {
        piece
        for words in Words(text).found
        for piece in re.split(r"\s{2,}|\n", words.strip())
        if re.search(r"[A-Za-z]", piece)
    }
    return {piece.strip() for piece in bare}


GETTEXT = {
    "gettext",
    "gettext_lazy",
    "gettext_noop",
    "ngettext",
    "ngettext_lazy",
    "pgettext",
    "pgettext_lazy",
    "npgettext",
    "npgettext_lazy",
}
BY_TABLE = {"diagnostics.py"}
"""Modules that look words up, which are wrapped in a table."""
SHOWN = {"label", "help_text", "description", "verbose_name", "verbose_name_plural", "search_help_text"}
"""Arguments and class attributes whose values are shown."""


def calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))


def name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def is_text(node: ast.expr) -> bool:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return any(re.search("[A-Za-z]", text) for text in texts)


def shown(tree: ast.Module) -> Iterator[ast.AST]:
    """Its nodes without models that no page shows, which have no name for people."""
    for statement in tree.body:
        inner = statement.body if isinstance(statement, ast.ClassDef) else []
        metas = [one for one in inner if isinstance(one, ast.ClassDef) and one.name == "Meta"]
        if not metas or "verbose_name" in ast.unparse(metas[0]):
            yield from ast.walk(statement)


def is_hidden(call: ast.Call) -> bool:
    """Whether it makes a field that is in no form."""
    return any(word.arg == "editable" and ast.unparse(word.value) == "False" for word in call.keywords)


def test_gettext_extracts_every_translated_string() -> None:
    """gettext finds literals, in calls of the names that it is given."""
    unknown, computed = [], []
    for path in SURFACES:
        imported = {
            name.asname or name.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module == "django.utils.translation"
            for name in node.names
            if name.name in GETTEXT
        }
        unknown += [f"{path}: {name}" for name in imported - {*GETTEXT, "_", *messages.ALIASES}]
        computed += [
            f"{path}:{call.lineno}"
            for call in calls(path)
            if name_of(call.func) in imported
            and not isinstance(call.args[0], ast.Constant)
            and path.name not in BY_TABLE
        ]

    assert (unknown, computed) == ([], [])


def test_every_shown_string_is_translated() -> None:
    found = [f"{path}:{node.lineno} {ast.unparse(node)}" for path in SURFACES for node in bare_texts(path)]

    assert found == []


def bare_texts(path: Path) -> list[ast.expr]:
    bare: list[ast.expr] = []
    for node in shown(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and not is_hidden(node):
            bare += [word.value for word in node.keywords if word.arg in SHOWN and is_text(word.value)]
            function = node.func
            if (
                isinstance(function, ast.Attribute)
                and name_of(function.value) == "messages"
                and len(node.args) > 1
            ):
                bare += [node.args[1]] if is_text(node.args[1]) else []
            if name_of(function) == "ValidationError" and node.args and is_text(node.args[0]):
                bare.append(node.args[0])
        elif isinstance(node, ast.Assign) and any(name_of(target) in SHOWN for target in node.targets):
            bare += [node.value] if is_text(node.value) else []
    return bare
