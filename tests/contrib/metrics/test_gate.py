"""Who may read the URLs of monitoring."""

import subprocess
import sys

import pytest
from django.test import Client

from djqueue.conf import problems, read_settings
from djqueue.contrib.metrics import views
from djqueue.errors import ConfigurationError

from .scraping import TOKEN

URLS = ("/djqueue/metrics", "/djqueue/scaling")
OTHER = "another-token-of-the-tests"


@pytest.fixture(autouse=True)
def _memory(settings, monkeypatch):
    settings.ROOT_URLCONF = "tests.contrib.metrics.urls"
    monitoring(settings)
    monkeypatch.delenv(views.TOKEN_VARIABLE, raising=False)


def monitoring(settings, **given):
    storage = {"BACKEND": "djqueue.storage.memory.MemoryStorage"}
    settings.DJQUEUE = {"STORAGE": storage, "MONITORING": given}


def status(authorization=None, method="get", **extra):
    headers = {} if authorization is None else {"authorization": authorization}
    [found] = {getattr(Client(), method)(url, headers=headers, **extra).status_code for url in URLS}
    return found


def test_every_request_is_rejected_when_no_token_is_configured():
    response = Client().get(URLS[0], headers={"authorization": "Bearer "})

    assert response.status_code == 403
    assert b"DJQUEUE_MONITORING_TOKEN" in response.content
    assert status() == status("Bearer None") == 403


def test_token_of_the_settings_grants_access(settings):
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


def test_token_of_the_environment_grants_access_unless_the_settings_have_one(settings, monkeypatch):
    monkeypatch.setenv(views.TOKEN_VARIABLE, TOKEN)
    assert status(f"Bearer {TOKEN}") == 200
    assert status() == 401

    monitoring(settings, TOKEN=OTHER)
    assert status(f"Bearer {OTHER}") == 200
    assert status(f"Bearer {TOKEN}") == 401


def test_new_token_in_the_token_file_takes_effect_immediately(settings, tmp_path):
    path = tmp_path / "token"
    monitoring(settings, TOKEN_FILE=path)
    path.write_text(f"{TOKEN}\n")
    assert status(f"Bearer {TOKEN}") == 200

    path.write_text(OTHER)

    assert status(f"Bearer {TOKEN}") == 401
    assert status(f"Bearer {OTHER}") == 200


@pytest.mark.parametrize("content", [None, "", "short", "with spaces in between", "ünïcödé-but-long-enough"])
def test_invalid_token_file_raises_an_error_without_its_content(settings, tmp_path, content):
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


def test_only_get_and_head_are_allowed(settings):
    monitoring(settings, TOKEN=TOKEN)

    assert status(f"Bearer {TOKEN}", "head") == 200
    for method in ("post", "put", "delete", "options"):
        assert status(f"Bearer {TOKEN}", method) == 405
    assert Client().post(URLS[0])["Allow"] == "GET, HEAD"


def test_token_grants_access_in_a_project_that_requires_logins(settings):
    pytest.importorskip("django.contrib.auth.middleware")
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.contrib.auth.middleware.LoginRequiredMiddleware"]
    monitoring(settings, TOKEN=TOKEN)

    assert status(f"Bearer {TOKEN}") == 200


def test_token_is_compared_in_constant_time(settings, monkeypatch):
    compared = []
    monkeypatch.setattr(views, "constant_time_compare", lambda *given: compared.append(given))
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


def test_missing_extras_are_reported_with_their_install_command():
    finished = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)

    assert finished.returncode == 0, finished.stderr
    assert "[501, 200]" in finished.stdout
    assert "pip install 'djqueue[metrics]'" in finished.stdout
    assert "pip install 'djqueue[otel]'" in finished.stdout


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"TOKEN": "too-short"}, "TOKEN must be a text of at least 16 printable ASCII characters"),
        ({"TOKEN": 1234567890123456}, "TOKEN must be a text of at least 16 printable ASCII characters"),
        ({"TOKEN": TOKEN, "TOKEN_FILE": "/run/token"}, "TOKEN and TOKEN_FILE exclude each other"),
        ({"TOKEN_FILE": 3}, "TOKEN_FILE must be the path of a file"),
        ({"PUBLIC": "no"}, "PUBLIC must be True or False"),
        ({"TOKENS": TOKEN}, "unknown key 'TOKENS'"),
    ],
)
def test_invalid_settings_are_explained_without_the_token(given, message):
    [problem] = problems({"MONITORING": given})

    assert message in problem
    assert TOKEN not in problem
    assert "too-short" not in problem


def test_repr_of_the_settings_hides_the_token():
    assert TOKEN not in repr(read_settings({"MONITORING": {"TOKEN": TOKEN}}))
