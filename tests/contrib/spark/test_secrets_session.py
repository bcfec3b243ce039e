"""URLs that refer to secrets, and two writes under one name, in Spark; `make test-spark` installs it."""

import pytest

from djqueue.contrib.spark import enqueue
from djqueue.storage.redis import RedisStorage
from djqueue.testing.factories import batch

pytest.importorskip("pyspark", reason="Spark is not installed here: see make test-spark")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture
def storage(redis_url):
    storage = RedisStorage(url=redis_url)
    yield storage
    storage.close()


@pytest.fixture
def reference(redis_url, tmp_path):
    path = tmp_path / "url"
    path.write_text(redis_url)
    return f"file:{path}"


def test_write_and_read_take_the_url_from_a_file(spark, storage, reference):
    report = enqueue(spark.range(5), "emails", "j", url=reference)

    assert report.inserted == 5
    jobs = spark.read.format("djqueue").option("url", reference).load()
    assert jobs.count() == 5


def test_create_table_with_a_password_is_rejected(spark):
    with pytest.raises(Exception, match=r"a password in CREATE TABLE .* use url=env:NAME") as raised:
        spark.sql("CREATE TABLE secret_jobs USING djqueue OPTIONS (url 'redis://:hunter2@h/0')")

    assert "hunter2" not in str(raised.value)


def test_table_without_a_url_is_read_with_the_url_of_the_query(spark, storage, reference):
    storage.enqueue([batch(3, queue="emails")])
    spark.sql(f"CREATE TABLE file_jobs USING djqueue OPTIONS (url '{reference}')")
    try:
        [row] = spark.sql(f"SELECT count(*) AS n FROM file_jobs WITH (url = '{reference}')").collect()
        with pytest.raises(Exception, match="Spark does not pass the options of a table in its catalog"):
            spark.sql("SELECT * FROM file_jobs").collect()
    finally:
        spark.sql("DROP TABLE file_jobs")

    assert row.n == 3
