"""Who may read the URLs of monitoring."""

import subprocess
import sys

import pytest
from django.test import Client

from djqueue import ConfigurationError
from djqueue.contrib.metrics import gate

from .scraping import TOKEN

URLS = ("/djqueue/metrics", "/djqueue/scaling")
OTHER = "another-token-of-the-tests"


@pytest.fixture(autouse=True)
def _memory(settings, monkeypatch):
    settings.ROOT_URLCONF = "tests.contrib.metrics.urls"
    monitoring(settings)
    monkeypatch.delenv(gate.TOKEN_VARIABLE, raising=False)


def monitoring(settings, **given):
    storage = {"BACKEND": "djqueue.storage.memory.MemoryStorage"}
    settings.DJQUEUE = {"STORAGE": storage, "MONITORING": given}


def status(authorization=None, method="get", **extra):
    headers = {} if authorization is None else {"authorization": authorization}
    [found] = {getattr(Client(), method)(url, headers=headers, **extra).status_code for url in URLS}
    return found


def test_without_a_token_every_request_is_refused():
    response = Client().get(URLS[0], headers={"authorization": "Bearer "})

    assert response.status_code == 403
    assert b"DJQUEUE_MONITORING_TOKEN" in response.content
    assert status() == status("Bearer None") == 403


def test_the_token_of_the_settings_opens_the_urls(settings):
    monitoring(settings, TOKEN=TOKEN)

    assert status(f"Bearer {TOKEN}") == status(f"bearer  {TOKEN}") == 200
    for wrong in (
        None,
        "",
        "Bearer",
        f"Bearer {OTHER}",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN}x",
        "Bearer ü",
    ):
        assert status(wrong) == 401, wrong
    response = Client().get(URLS[0], {"token": TOKEN})
    assert (response.status_code, response["WWW-Authenticate"]) == (401, 'Bearer realm="djqueue"')
    assert response["Cache-Control"] == "no-store"


def test_the_token_of_the_environment_opens_the_urls(settings, monkeypatch):
    monkeypatch.setenv(gate.TOKEN_VARIABLE, TOKEN)
    assert status(f"Bearer {TOKEN}") == 200
    assert status() == 401

    monitoring(settings, TOKEN=OTHER)
    assert status(f"Bearer {OTHER}") == 200
    assert status(f"Bearer {TOKEN}") == 401


def test_a_new_token_in_the_file_counts_at_once(settings, tmp_path):
    path = tmp_path / "token"
    monitoring(settings, TOKEN_FILE=path)
    path.write_text(f"{TOKEN}\n")
    assert status(f"Bearer {TOKEN}") == 200

    path.write_text(OTHER)

    assert status(f"Bearer {TOKEN}") == 401
    assert status(f"Bearer {OTHER}") == 200


@pytest.mark.parametrize("content", [None, "", "short", "with spaces in between", "ünïcödé-but-long-enough"])
def test_a_bad_token_file_opens_nothing(settings, tmp_path, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    monitoring(settings, TOKEN_FILE=path)

    with pytest.raises(ConfigurationError) as caught:
        status("Bearer short")

    assert str(path) in str(caught.value)
    assert not content or content not in str(caught.value)


def test_public_urls_need_no_token(settings):
    monitoring(settings, PUBLIC=True)

    assert status() == 200


def test_only_reading_is_allowed(settings):
    monitoring(settings, TOKEN=TOKEN)

    assert status(f"Bearer {TOKEN}", "head") == 200
    for method in ("post", "put", "delete", "options"):
        assert status(f"Bearer {TOKEN}", method) == 405
    assert Client().post(URLS[0])["Allow"] == "GET, HEAD"


def test_a_project_that_requires_logins_keeps_the_urls_open_for_the_token(settings):
    pytest.importorskip("django.contrib.auth.middleware")
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.contrib.auth.middleware.LoginRequiredMiddleware"]
    monitoring(settings, TOKEN=TOKEN)

    assert status(f"Bearer {TOKEN}") == 200


def test_the_token_is_compared_in_constant_time(settings, monkeypatch):
    compared = []
    monkeypatch.setattr(gate, "constant_time_compare", lambda *given: compared.append(given))
    monitoring(settings, TOKEN=TOKEN)

    assert status("Bearer x") == 401
    assert compared == [("x", TOKEN)] * 2


WITHOUT = """
import sys
sys.modules["prometheus_client"] = sys.modules["opentelemetry"] = None
import django
from django.conf import settings
settings.configure(
    ROOT_URLCONF="djqueue.contrib.metrics.urls", ALLOWED_HOSTS=["*"], INSTALLED_APPS=["djqueue"],
    DJQUEUE={"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}, "MONITORING": {"PUBLIC": True}},
)
django.setup()
from django.test import Client
answers = [Client().get(url) for url in ("/metrics", "/scaling")]
print([answer.status_code for answer in answers], answers[0].content.decode())
from djqueue.middleware import problem
print(problem("djqueue.contrib.otel.TracingMiddleware"))
"""


def test_missing_extras_are_named():
    finished = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)

    assert finished.returncode == 0, finished.stderr
    assert "[501, 200]" in finished.stdout
    assert "pip install 'djqueue[metrics]'" in finished.stdout
    assert "pip install 'djqueue[otel]'" in finished.stdout
