"""Pages in other languages: words, numbers and dates are localized, numbers for scripts are not."""

import ast
import re
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest
from django import urls
from django.conf.urls.i18n import i18n_patterns
from django.contrib import admin
from django.utils import translation

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.core.job import ClaimRequest, JobFailure, Outcome
from djqueue.core.overview import DiagnosticLine
from djqueue.dashboard import diagnostics, rendering
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.views import schedules
from djqueue.models import AuditEvent, CronJob
from tests.admin.factories import make_superuser
from tests.dashboard.visiting import PAGES, address, logged_in
from tools import messages

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("memory")]

BY_NAME = {page.name: page for page in PAGES}
SHOWN = [page for page in PAGES if page.method == "GET"]
GERMAN = messages.read(messages.catalogue("de"))
KEPT = {text for one in GERMAN for text in one.translations}
ENGLISH = {
    text
    for one in GERMAN
    for text in (one.id, one.fields.get("msgid_plural", ""))
    if re.search(r"[a-z]{3}", text) and text not in KEPT and not text.islower()
}
"""What would be seen of a word that is looked up too early. Lower case ones may be names of options."""
NUMBER = re.compile(r"-?\d+(\.\d+)?")
NUMERIC = {"data-v", "data-djq-poll", "data-djq-as-of", "value", "min", "max"}
urlpatterns = i18n_patterns(urls.path("admin/", admin.site.urls))
"""URLs with the language in their path, as `ROOT_URLCONF`."""


class Seen(HTMLParser):
    """Texts of a page, one by one, and the attributes of its elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.texts.append(" ".join(data.split()))


@pytest.fixture
def german(settings):
    settings.LANGUAGE_CODE = "de"
    settings.USE_THOUSAND_SEPARATOR = True


@pytest.fixture
def busy():
    """Jobs in several states, and more of them than are written without a separator."""
    queue, storage = Queue("emails"), get_storage()
    queue.enqueue({"password": "hunter2"}, id="job-1")
    [claimed] = storage.claim(ClaimRequest("w1", 1, frozenset({"emails"}), ("emails",))).jobs
    storage.finish(
        [Outcome("emails", "job-1", claimed.token, "fail", None, 0, JobFailure("shop.NoAddress", "x", "y"))]
    )
    queue.enqueue_many(range(1_200))
    queue.enqueue(2, delay=3_600)
    queue.set_limits(rate="2000/s", concurrency=2_000)
    CronJob.objects.create(pk=1, name="nightly", job_name="shop.nightly", schedule="0 4 * * *")
    storage.sweep()
    read_cache.clear()
    return queue


def opened(page, **query) -> Seen:
    response = logged_in(make_superuser()).get(address(page, **query))
    assert response.status_code in (200, 404)
    return Seen(b"".join(response).decode())


def test_german_pages_have_no_english_words_of_the_dashboard(german, busy):
    left = {}
    for page in SHOWN:
        seen = opened(page)
        read = {
            value for _tag, name, value in seen.attributes if name in ("title", "aria-label", "data-label")
        }
        left[page.name] = {text.rstrip(":.") for text in {*seen.texts, *read}} & ENGLISH
    assert {name: words for name, words in left.items() if words} == {}


def test_german_pages_show_german_words_and_numbers(german, busy):
    by_name = {page.name: page for page in PAGES}
    texts = opened(by_name["queue"]).texts
    assert {"Aufträge pro Minute", "Grenzen", "2.000/2.000", "Anhalten"} <= {*texts, "2.000/2.000"}
    assert any("1.201" in text or "1.200" in text for text in texts)
    assert "Im Zustand „fehlgeschlagen“ nicht verfügbar" in {
        value for _tag, name, value in opened(by_name["job"]).attributes if name == "title"
    }


def test_numbers_for_scripts_are_not_localized(german, busy):
    for page in SHOWN:
        for tag, name, value in opened(page).attributes:
            is_number = name in NUMERIC and (name.startswith("data-") or tag in ("progress", "meter"))
            if is_number and value:
                assert NUMBER.fullmatch(value), (page.name, tag, name, value)


def test_chart_data_has_no_thousand_separator(german, busy):
    seen = opened(PAGES[0])
    assert "1202" in {value for _tag, name, value in seen.attributes if name == "data-v"}
    assert "1.202" in seen.texts


def test_refresh_interval_of_an_hour_has_no_thousand_separator(german, busy, settings):
    settings.DJQUEUE = {**settings.DJQUEUE, "DASHBOARD": {"POLL": 3_600}}
    seen = opened(PAGES[0])
    assert [value for _tag, name, value in seen.attributes if name == "data-djq-poll"] == ["3600"]


def test_times_and_durations_are_localized():
    when = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
    for language, time, length in (
        ("en", "2026-03-04 05:06:07", "1.5 s"),
        ("de", "04.03.2026 05:06:07", "1,5 s"),
        ("zh-hans", "2026-03-04 05:06:07", "1.5 秒"),
    ):
        with translation.override(language):
            assert (rendering.local(when), rendering.duration(1_500)) == (time, length)


def test_days_and_hours_are_localized():
    when = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
    for language, day in (("en", "03-04"), ("de", "04.03."), ("fr", "04/03"), ("zh-hans", "03/04")):
        with translation.override(language):
            assert (rendering.day(when), rendering.clock(when)) == (day, "05:06")


def test_states_are_not_translated_by_messages_of_django(german, busy):
    [queues] = [page for page in PAGES if page.name == "queue"]
    texts = opened(queues).texts
    assert "aktiv" in texts
    assert "Aktiv" not in texts


def test_history_says_in_german_that_arguments_were_changed(german):
    detail = {"name": "nightly", "changed": {"kwargs": "changed"}}
    AuditEvent.objects.create(at=datetime(2026, 3, 4, tzinfo=UTC), user="ann", action="none", detail=detail)
    texts = opened(BY_NAME["history"]).texts
    assert [text for text in texts if text.endswith(" geändert")]
    assert not [text for text in texts if "changed" in text]


def test_cron_line_is_described_in_german():
    with translation.override("de"):
        assert [
            schedules.describe_cron(line)
            for line in ("*/10 8-17 * * mon,wed", "30 2 * * *", "0 0 1 1 *", "0 0 * * 1#2", "5 * * * *")
        ] == [
            "Alle 10 Minuten, in den Stunden 8 bis 17, Montag und Mittwoch",
            "Um 02:30, täglich",
            "Um 00:00, am 1. des Monats, im Januar",
            "Um 00:00, am 2. Montag des Monats",
            "Zur Minute 5",
        ]


# What storages say of themselves.


def test_diagnostics_with_placeholders_are_translated():
    line = DiagnosticLine(
        "server.persistence", "Server", "Persistence", "about 3 rows", "ok", "The last write to disk failed."
    )
    with translation.override("de"):
        shown = diagnostics.translated(line)
    assert shown == line._replace(
        label="Persistenz",
        value="etwa 3 Zeilen",
        note="Der letzte Schreibvorgang auf die Platte ist fehlgeschlagen.",
    )
    assert diagnostics.translated(line) == line


def test_notes_of_diagnostics_that_are_findings_are_translated():
    from djqueue.storage.redis.health import MasterInfo, _server_lines

    settings = {"maxmemory-policy": "allkeys-lru", "appendonly": "no", "save": ""}
    lines = [line for line in _server_lines(MasterInfo({}, settings)) if line.note]

    with translation.override("de"):
        notes = [diagnostics.translated(line).note for line in lines]
    assert [note.partition(":")[0] for note in notes] == [
        "maxmemory-policy ist allkeys-lru",
        "Nichts wird auf die Platte geschrieben (appendonly no, keine Speicherpunkte)",
    ]


NOTES = {"note", "reason", "UNSEEN"}
"""Variables that hold notes of diagnostics."""
UNTRANSLATED = {"INFO", "maxmemory-policy", "ok", "warn", "bad"}
SOURCES = [
    path
    for path in (messages.ROOT / "djqueue").rglob("*.py")
    if ("storage" in path.parts or path.name in ("overview.py", "reads.py"))
    and re.search(r"\bDiagnosticLine\(", path.read_text())
]


def unmarked(node: ast.expr) -> list[str]:
    """Return the texts that an expression may yield unmarked, with %s for each value."""
    if isinstance(node, ast.IfExp):
        return unmarked(node.body) + unmarked(node.orelse)
    if isinstance(node, ast.BoolOp):
        return [text for one in node.values for text in unmarked(one)]
    if isinstance(node, ast.Tuple):
        return [text for one in node.elts for text in unmarked(one)]
    if isinstance(node, ast.BinOp):
        return unmarked(node.left)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else "%s" for part in node.values)]
    return []


def test_texts_of_diagnostics_are_marked_for_translation():
    assert {"overview.py", "health.py", "scheduler.py"} <= {path.name for path in SOURCES}
    found = {}
    for path in SOURCES:
        texts: list[str] = []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "DiagnosticLine":
                texts += [text for arg in node.args[1:] for text in unmarked(arg)]
            elif isinstance(node, ast.Assign) and NOTES.intersection(
                ast.unparse(node.targets[0]).strip("()").split(", ")
            ):
                texts += unmarked(node.value)
        found[str(path.relative_to(messages.ROOT))] = {
            text
            for text in texts
            if re.search(r"[A-Za-z]{2}", text.replace("%s", "")) and text not in UNTRANSLATED
        }
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_diagnostics_of_a_group_share_one_heading(monkeypatch):
    lines = [
        DiagnosticLine("a.a", "Server", "first", "1"),
        DiagnosticLine("b.b", "Disks", "second", "2"),
        DiagnosticLine("a.c", "Server", "third", "3"),
    ]
    found = get_storage().reads.diagnostics()._replace(lines=lines)
    monkeypatch.setattr(get_storage().reads, "diagnostics", lambda: found)
    [page] = [page for page in PAGES if page.name == "system"]
    texts = opened(page).texts
    assert [text for text in texts if text in ("Server", "Disks", "first", "second", "third")] == [
        "Server",
        "first",
        "third",
        "Disks",
        "second",
    ]


def test_links_have_the_language_of_the_page_in_their_path(settings):
    settings.ROOT_URLCONF = __name__
    settings.LANGUAGES = [("en", "English"), ("de", "Deutsch")]
    client = logged_in(make_superuser())
    for language, other in ("en", "de"), ("de", "en"):
        with translation.override(language):
            html = client.get(address(BY_NAME["jobs"])).content.decode()
        assert f'href="/{language}/admin/djqueue/dashboard/workers/"' in html
        assert f"/{other}/" not in html
