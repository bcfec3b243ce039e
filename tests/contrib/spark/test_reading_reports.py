"""Reports that the caller's process cannot read, before and after a write."""

import pytest

pytest.importorskip("pyspark", reason="Spark is not installed here: see make test-spark")

from djqueue.contrib.spark import enqueue
from djqueue.core.errors import OptionError, StorageUnavailableError

pytestmark = pytest.mark.spark
UNREACHABLE = "redis://127.0.0.1:1/0"


class Frame:
    """A DataFrame that only records that it was saved."""

    def __init__(self, during=lambda: None):
        self.saved = 0
        self.during = during

    @property
    def write(self):
        return self

    def format(self, name):
        return self

    def options(self, **given):
        return self

    def mode(self, name):
        return self

    def save(self):
        self.saved += 1
        self.during()


@pytest.mark.parametrize(
    ("url", "error"), [(UNREACHABLE, StorageUnavailableError), ("env:DJQUEUE_NONE", OptionError)]
)
def test_write_without_access_to_its_report_is_not_started(url, error):
    frame = Frame()

    with pytest.raises(error):
        enqueue(frame, "emails", "j", url=url)

    assert frame.saved == 0


def test_write_succeeds_if_its_report_cannot_be_read_afterwards(redis_url, monkeypatch, caplog):
    monkeypatch.setenv("DJQUEUE_URL", redis_url)
    frame = Frame(during=lambda: monkeypatch.setenv("DJQUEUE_URL", UNREACHABLE))

    assert enqueue(frame, "emails", "j", url="env:DJQUEUE_URL") is None

    assert frame.saved == 1
    assert "is done, but its report could not be read" in caplog.text


class RemoteFrame(Frame):
    """A DataFrame of Spark Connect."""

    __module__ = "pyspark.sql.connect.dataframe"


@pytest.mark.parametrize("dry_run", [False, True])
def test_spark_connect_client_rejects_a_url_with_a_password(dry_run):
    frame = RemoteFrame()

    with pytest.raises(OptionError, match="url: the server of Spark Connect shows") as raised:
        enqueue(frame, "emails", "j", url="redis://:hunter2@127.0.0.1:1/0", dry_run=dry_run)

    assert frame.saved == 0
    assert "hunter2" not in str(raised.value)


def test_spark_connect_client_accepts_a_url_reference(redis_url, monkeypatch):
    monkeypatch.setenv("DJQUEUE_URL", redis_url)
    frame = RemoteFrame()

    enqueue(frame, "emails", "j", url="env:DJQUEUE_URL")

    assert frame.saved == 1
