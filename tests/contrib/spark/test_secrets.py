"""URLs that refer to an environment variable or a file."""

from contextlib import closing

import pytest

from djqueue.contrib.spark.locations import has_password, resolved, storage_at
from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.pipeline import commands
from djqueue.contrib.spark.writing import Write
from djqueue.core.errors import OptionError


def test_url_can_come_from_a_variable_or_a_file(url, tmp_path, monkeypatch):
    monkeypatch.setenv("DJQUEUE_URL", f"{url}\n")
    path = tmp_path / "url"
    path.write_text(f"{url}\n")

    for reference in ("env:DJQUEUE_URL", f"file:{path}", f"file://{path}"):
        with closing(storage_at(reference)) as storage:
            storage.connect()
            assert storage.reads.counts("emails")


def test_pickled_write_contains_the_reference_and_not_the_url(redis_url, monkeypatch):
    monkeypatch.setenv("DJQUEUE_URL", redis_url)
    given = {"url": "env:DJQUEUE_URL", "queue": "emails", "job": "j"}

    made = Write(WriteOptions.read(given), ["n"])

    assert made.options.url == "env:DJQUEUE_URL"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("env:DJQUEUE_NONE", r"url: env:DJQUEUE_NONE: the environment variable 'DJQUEUE_NONE' is not set"),
        ("file:/nowhere/url", r"url: file:/nowhere/url: process \d+ on .+ cannot read the file"),
        ("env:DJQUEUE_OTHER", "another reference"),
    ],
)
def test_missing_variable_or_file_is_rejected_with_its_name(monkeypatch, url, message):
    monkeypatch.setenv("DJQUEUE_OTHER", "env:DJQUEUE_OTHER")

    with pytest.raises(OptionError, match=message):
        resolved(url)


def test_empty_url_file_is_rejected(tmp_path):
    (tmp_path / "url").write_text("\n")

    with pytest.raises(OptionError, match="the file is empty"):
        resolved(f"file:{tmp_path}/url")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://:secret@h/0", True),
        ("redis://user:secret@h:1/0", True),
        ("postgresql://u:p%2F@h/n", True),
        ("redis://h/0?password=secret", True),
        ("redis://h:6379/0", False),
        ("redis://user@h/0", False),
        ("sqlite:///x.db", False),
        ("env:NAME", False),
        ("file:/run/secrets/url", False),
    ],
)
def test_passwords_in_urls_are_detected(url, expected):
    assert has_password(url) is expected


def test_command_line_accepts_a_url_reference():
    arguments = ["archive", "/a", "--url", "env:DJQUEUE_NONE"]

    assert commands.parser().parse_args(arguments).url == "env:DJQUEUE_NONE"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("env:redis://:hunter2@h/0", "url: env: is followed by a URL; expected the name of an environment"),
        ("file:redis://h/0?password=hunter2", "url: file: is followed by a URL; expected the path of a file"),
        ("env:", "url: env: is incomplete; expected the name of an environment variable"),
        ("file:", "url: file: is incomplete; expected the path of a file"),
    ],
)
def test_url_in_place_of_a_reference_is_hidden_in_the_error(url, message):
    with pytest.raises(OptionError, match=message) as raised:
        resolved(url)

    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("scheme", ["redis", "redis+sentinel", "redis+cluster", "postgresql", "sqlite"])
def test_error_context_does_not_contain_a_part_of_the_password(scheme):
    with pytest.raises(OptionError) as raised:
        storage_at(f"{scheme}://ann:hunter2/x@h:1/0")

    error: BaseException | None = raised.value
    while error is not None:
        assert "hunter2" not in repr(error)
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    ("url", "prefix", "message"),
    [
        ("redis://h/shop", "", r"^url: the path must be a database number"),
        ("redis://h/0?foo=1", "", r"^url: 'foo' is not an argument of Redis connections"),
        ("redis+sentinel://h", "", r"^url: does not name the master"),
        ("redis://h/0?ssl_foo=1", "", r"^url: redis-py rejects the arguments"),
        ("redis://h/0", "{shop}", r"^keyPrefix: expected a string without braces, got '{shop}'"),
    ],
)
def test_errors_name_the_option_instead_of_a_setting(url, prefix, message):
    with pytest.raises(OptionError, match=message):
        storage_at(url, prefix)


def test_url_of_encrypted_sentinels_is_accepted():
    with closing(storage_at("rediss+sentinel://h:1/djqueue/0")) as storage:
        assert storage.describe() == "redis sentinel djqueue at h:1"
