"""Brings the catalogues of djqueue/locale up to date: `python -m tools.messages [LANGUAGE...]`.

What is to be translated is found with Django's `makemessages`, which takes GNU gettext: it knows the
templates' tags, and what msgfmt checks is what every translator's editor checks. It works in a copy of
the package, as it leaves its temporary files beside the templates.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from django.core.management.commands import makemessages

ROOT = Path(__file__).resolve().parents[1]
LOCALE = ROOT / "djqueue" / "locale"
CHANGING = re.compile(r'^"POT-Creation-Date: .*\n', re.MULTILINE)
ALIASES = ("_now",)
"""Names beside Django's own under which modules import gettext's functions."""


class Extraction(makemessages.Command):
    """Django's, without guesses: what has changed is to be translated anew."""

    msgmerge_options = [*makemessages.Command.msgmerge_options, "--no-fuzzy-matching"]
    xgettext_options = [
        *makemessages.Command.xgettext_options,
        *(f"--keyword={name}" for name in ALIASES),
    ]


@dataclass
class Message:
    """One entry of a catalogue."""

    places: str = ""
    flags: str = ""
    fields: dict[str, str] = field(default_factory=dict)
    """`msgctxt`, `msgid`, `msgid_plural`, and `msgstr` or `msgstr[0]` and so on."""

    @property
    def id(self) -> str:
        return self.fields.get("msgid", "")

    @property
    def translations(self) -> list[str]:
        return [text for name, text in self.fields.items() if name.startswith("msgstr")]

    @property
    def is_missing(self) -> bool:
        return not all(self.translations) or "fuzzy" in self.flags


def languages() -> list[str]:
    """Those that there are."""
    return sorted(path.parents[1].name for path in LOCALE.glob("*/LC_MESSAGES/django.po"))


def catalogue(language: str, locale: Path = LOCALE) -> Path:
    return locale / language / "LC_MESSAGES" / "django.po"


def read(po: Path) -> list[Message]:
    """The messages of a catalogue, without its header."""
    found = []
    for block in re.split(r"\n\s*\n", po.read_text()):
        message, name = Message(), ""
        for line in block.splitlines():
            if line.startswith("#:"):
                message.places += line[2:]
            elif line.startswith("#,"):
                message.flags += line[2:]
            elif line.startswith("#"):
                continue
            elif matched := re.match(r'(msg\S+) (".*")$', line):
                name = matched[1]
                message.fields[name] = unquoted(matched[2])
            elif line.startswith('"'):
                message.fields[name] += unquoted(line)
        if message.id:
            found.append(message)
    return found


def unquoted(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: {"n": "\n", "t": "\t"}.get(found[1], found[1]), text[1:-1])


@contextmanager
def extracted(*chosen: str) -> Iterator[Path]:
    """A folder with the catalogues as they ought to be, merged with what is there."""
    with tempfile.TemporaryDirectory(prefix="djqueue-messages-") as folder:
        copy = Path(folder, "djqueue")
        leave = shutil.ignore_patterns("__pycache__", "templates", "static", "migrations", "*.mo")
        shutil.copytree(ROOT / "djqueue", copy, ignore=leave)
        shutil.copytree(ROOT / "templates", copy / "templates")
        with chdir(copy):
            command = Extraction(stdout=StringIO())
            command.run_from_argv(
                ["", "makemessages", "--no-obsolete", "--add-location=file", *(f"-l{one}" for one in chosen)]
            )
        yield copy / "locale"


def compiled(po: Path, mo: Path) -> None:
    """Compile a catalogue; what its placeholders lack is an error."""
    subprocess.run(["msgfmt", "--check", "--no-hash", "-o", str(mo), str(po)], check=True)


def main(chosen: list[str]) -> int:
    """Extract, merge, compile; 1 if translations are missing, which are listed."""
    wanted = chosen or languages()
    missing = 0
    with extracted(*wanted) as locale:
        for language in wanted:
            new, po = catalogue(language, locale), catalogue(language)
            text = CHANGING.sub("", new.read_text())
            if not po.exists() or po.read_text() != text:
                po.parent.mkdir(parents=True, exist_ok=True)
                po.write_text(text)
            compiled(po, po.with_suffix(".mo"))
            messages = read(po)
            lacking = [message for message in messages if message.is_missing]
            missing += len(lacking)
            print(f"{language}: {len(messages)} messages, {len(lacking)} to be translated in {po}")
            for message in lacking:
                print(f"  {message.id!r} ({message.places.strip()})")
    return 1 if missing else 0


if __name__ == "__main__":
    from django.conf import settings

    settings.configure(USE_I18N=True)
    sys.exit(main(sys.argv[1:]))
