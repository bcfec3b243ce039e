"""Models, and the field that stores their times."""

from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest
from django.core.exceptions import FieldError, ValidationError
from django.core.management import call_command
from django.db import IntegrityError, connection, models, transaction
from django.db.models import F, Max, Min
from django.utils.timezone import now

from djqueue.core.errors import OptionError
from djqueue.core.states import State
from djqueue.core.units import to_datetime
from djqueue.models import CronJob, Job, JobLog, JobState, LeaderLeaseRow

pytestmark = pytest.mark.dialect
NOON = datetime(2026, 6, 1, 12, 0, 0, 123_000, tzinfo=UTC)
MILLISECONDS = 1_780_315_200_123
KATHMANDU = timezone(timedelta(hours=5, minutes=45))


def make_log(at: Any, line: str = "") -> JobLog:
    return JobLog.objects.create(queue="q", job_id="1", at=at, line=line)


def make_job(**fields: Any) -> Job:
    given = {"queue": "q", "job_id": "1", "name": "n", "state": "waiting", "payload": b""}
    times = {"created_at": NOON, "run_at": NOON}
    return Job.objects.create(**{**given, **times, "options": b"", "content_type": "x", **fields})


def make_cron(**fields: Any) -> CronJob:
    return CronJob(**{"name": "c", "job_name": "n", "schedule": "@daily", **fields})


# Migrations.


@pytest.mark.django_db
def test_no_migration_is_missing() -> None:
    call_command("makemigrations", "djqueue", check=True, dry_run=True, verbosity=0)


@pytest.mark.django_db
def test_the_scheduler_needs_no_row_of_a_migration() -> None:
    assert not LeaderLeaseRow.objects.exists()


def test_model_states_match_engine_states() -> None:
    assert JobState.values == [state.value for state in State]


def test_table_names_are_explicit() -> None:
    assert Job._meta.db_table == "djqueue_job"
    assert CronJob._meta.db_table == "djqueue_cron_job"


@pytest.mark.django_db
def test_job_id_is_unique_in_its_queue() -> None:
    make_job()
    make_job(queue="other")
    with pytest.raises(IntegrityError), transaction.atomic():
        make_job()


# Milliseconds.


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (NOON, NOON),
        (NOON.astimezone(KATHMANDU), NOON),
        (MILLISECONDS, NOON),
        (0, datetime(1970, 1, 1, tzinfo=UTC)),
        (-1, datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)),
        (NOON + timedelta(microseconds=999), NOON),
        ("2026-06-01T12:00:00.123Z", NOON),
    ],
)
def test_time_is_read_as_an_aware_datetime_with_milliseconds(given: Any, kept: datetime) -> None:
    row = make_log(given)
    at = JobLog.objects.get(pk=row.pk).at
    assert at == kept
    assert at.tzinfo is UTC


@pytest.mark.django_db
def test_null_time_stays_null() -> None:
    job = make_job(started_at=None)
    assert Job.objects.get(pk=job.pk).started_at is None
    assert Job.objects.filter(started_at__isnull=True).exists()


@pytest.mark.django_db
def test_time_is_stored_as_an_integer() -> None:
    make_log(NOON)
    with connection.cursor() as cursor:
        cursor.execute("SELECT at FROM djqueue_job_log")
        assert cursor.fetchone() == (MILLISECONDS,)
    assert JobLog._meta.get_field("at").db_type(connection) == "bigint"


@pytest.mark.django_db
def test_times_filter_and_order_as_datetimes_and_as_numbers() -> None:
    rows = [make_log(NOON + timedelta(milliseconds=n)) for n in (2, 0, 1)]
    assert list(JobLog.objects.order_by("at")) == [rows[1], rows[2], rows[0]]
    middle = NOON + timedelta(milliseconds=1)
    assert list(JobLog.objects.filter(at=middle)) == [rows[2]]
    assert JobLog.objects.filter(at__lt=middle).count() == 1
    assert JobLog.objects.filter(at__gte=MILLISECONDS + 1).count() == 2
    assert JobLog.objects.filter(at__in=[NOON, middle]).count() == 2
    assert JobLog.objects.filter(at__range=(NOON, middle)).count() == 2
    assert JobLog.objects.exclude(at__lte=middle.astimezone(KATHMANDU)).count() == 1
    ends = JobLog.objects.aggregate(first=Min("at"), last=Max("at"))
    assert ends == {"first": NOON, "last": NOON + timedelta(milliseconds=2)}


@pytest.mark.django_db
def test_time_can_be_written_by_every_orm_method() -> None:
    row = make_log(NOON)
    JobLog.objects.bulk_create([JobLog(queue="q", job_id="2", at=NOON, line="")])
    JobLog.objects.update(at=NOON + timedelta(seconds=1))
    JobLog.objects.update(at=F("at") + 1)
    row.refresh_from_db()
    assert row.at == NOON + timedelta(seconds=1, milliseconds=1)
    row.at = NOON
    JobLog.objects.bulk_update([row], ["at"])
    assert set(JobLog.objects.values_list("at", flat=True)) == {
        NOON,
        NOON + timedelta(seconds=1, milliseconds=1),
    }


@pytest.mark.django_db
@pytest.mark.parametrize("lookup", ["at__year", "at__date", "at__hour", "at__month__gt"])
def test_lookups_of_date_parts_are_rejected(lookup: str) -> None:
    with pytest.raises(FieldError, match=lookup.split("__")[1]):
        JobLog.objects.filter(**{lookup: 2026}).exists()


@pytest.mark.django_db
def test_naive_datetimes_can_be_filtered_without_time_zone_support(settings: Any) -> None:
    settings.USE_TZ = False
    settings.TIME_ZONE = "Europe/Berlin"
    make_log(datetime(2026, 6, 1, 14, 0, 0, 123_000))
    assert JobLog.objects.get(at__lt=datetime(2026, 6, 1, 14, 1)).at == NOON
    assert JobLog.objects.filter(at__lt=datetime(2026, 6, 1, 14, 0)).count() == 0
    assert JobLog.objects.filter(at__gt=date(2026, 6, 1)).count() == 1


def test_milliseconds_field_deconstructs_to_its_class() -> None:
    _name, path, arguments, options = JobLog._meta.get_field("at").deconstruct()
    assert (path, arguments) == ("djqueue.fields.MillisecondsField", [])
    assert set(options) == {"verbose_name"}
    assert isinstance(JobLog._meta.get_field("at"), models.DateTimeField)


# Cron jobs.


@pytest.mark.django_db
def test_saved_cron_job_has_its_next_run() -> None:
    cron = make_cron(schedule="0 0 1 1 *", timezone="Asia/Kathmandu")
    cron.save()
    at = CronJob.objects.get().next_run_at
    assert at is not None
    assert at > now()
    local = at.astimezone(KATHMANDU)
    assert (local.month, local.day, local.hour, local.minute) == (1, 1, 0, 0)


@pytest.mark.django_db
def test_disabled_cron_job_has_no_next_run() -> None:
    cron = make_cron()
    cron.save()
    cron.enabled = False
    cron.save()
    assert CronJob.objects.get().next_run_at is None
    cron.enabled = True
    cron.save()
    assert CronJob.objects.get().next_run_at is not None


@pytest.mark.django_db
def test_overdue_run_stays_due_when_the_cron_job_is_edited() -> None:
    cron = make_cron(schedule="0 3 * * *")
    cron.save()
    overdue = datetime(2026, 1, 5, 3, tzinfo=UTC)
    CronJob.objects.update(next_run_at=overdue)
    cron.refresh_from_db()
    cron.args = [1]
    cron.save()
    assert CronJob.objects.get().next_run_at == overdue


@pytest.mark.django_db
def test_saving_selected_fields_keeps_the_next_run() -> None:
    cron = make_cron()
    cron.save()
    far = to_datetime(MILLISECONDS)
    CronJob.objects.update(next_run_at=far)
    cron.executions = 3
    cron.save(update_fields=["executions"])
    assert CronJob.objects.get().next_run_at == far


@pytest.mark.django_db
def test_cron_job_with_an_invalid_schedule_is_not_saved() -> None:
    with pytest.raises(OptionError, match="61"):
        make_cron(schedule="61 * * * *").save()
    assert not CronJob.objects.exists()


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"schedule": "x"}, {"schedule"}),
        ({"schedule": "0 0 */31 2 2#5"}, {"schedule"}),
        ({"timezone": "Mars"}, {"timezone"}),
        ({"schedule": "x", "timezone": "Mars"}, {"schedule", "timezone"}),
        ({"args": {}}, {"args"}),
        ({"args": "ab"}, {"args"}),
        ({"kwargs": []}, {"kwargs"}),
    ],
)
def test_cron_job_is_validated_field_by_field(fields: dict[str, Any], wrong: set[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        make_cron(**fields).clean()
    assert set(refused.value.message_dict) == wrong


def test_valid_cron_job_passes_validation() -> None:
    cron = make_cron(queue="anything", args=None, kwargs=None)
    cron.clean()
    assert (cron.args, cron.kwargs) == ([], {})


def test_cron_job_must_use_a_configured_queue_with_strict_queues(settings: Any) -> None:
    settings.DJQUEUE = {"QUEUES": ["emails"], "STRICT_QUEUES": True}
    make_cron(queue="emails").clean()
    make_cron(queue="").clean()
    with pytest.raises(ValidationError) as refused:
        make_cron(queue="emial").clean()
    assert set(refused.value.message_dict) == {"queue"}
