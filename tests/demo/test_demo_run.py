"""The whole demo, as `make demo` and `make demo-check` run it."""

import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urljoin
from urllib.request import ProxyHandler, build_opener

import pytest
from PIL import Image

from demo_project.flights.charts import SIZE
from demo_project.flights.digests import on_disk
from tests.support import PATIENCE

from .project import DESTINATIONS, ORIGINS, TIMEOUT_SECONDS, DemoProject

pytestmark = pytest.mark.slow
DEMO = ("-m", "demo_project.demo")


@pytest.mark.thorough
def test_counts_of_a_checked_run_add_up(checked_with_all_airports: tuple[DemoProject, str]) -> None:
    _, output = checked_with_all_airports
    counts = dict(re.findall(r"^ *(\S.*?\S) +([\d,]+) +\2$", output, re.MULTILINE))
    assert counts["flights loaded"] == "5,000"
    assert int(counts["badly delayed flights"]) == (
        int(counts["assessed"])
        + int(counts["dead letter: arrival not on record"])
        + int(counts["dead letter: aircraft not on record"])
    )
    assert int(counts["assessed"]) > 0
    assert int(counts["dead letter: aircraft not on record"]) > 0
    assert counts["jobs still open"] == "0"


@pytest.mark.thorough
@pytest.mark.parametrize("storage", ["postgres", "redis", "scheduler"])
def test_counts_of_a_checked_run_add_up_on_every_storage(storage: str) -> None:
    with tempfile.TemporaryDirectory(prefix="djqueue-") as folder:  # PostgreSQL's account may open it
        finished = DemoProject(Path(folder)).run(*DEMO, "--check", "--flights", "5000", "--storage", storage)
        assert finished.returncode == 0, finished.stdout + finished.stderr


def test_checked_run_draws_a_chart_for_each_airport(checked: tuple[DemoProject, str]) -> None:
    project, _ = checked
    charts = {path.stem: path for path in (project.var / "media" / "charts").iterdir()}
    assert charts.keys() == ORIGINS | DESTINATIONS
    with Image.open(charts["ATL"]) as chart:
        assert chart.size == SIZE


def test_checked_run_sends_one_email_to_each_airline(checked: tuple[DemoProject, str]) -> None:
    project, _ = checked
    mails = list(on_disk(project.var / "mail"))
    assert len(mails) == len({mail["To"] for mail in mails}) == 16
    assert len({mail["Message-ID"] for mail in mails}) == 16


def test_checked_run_prints_the_admin_address_and_its_progress(checked: tuple[DemoProject, str]) -> None:
    _, output = checked
    assert re.search(r"The admin is at http://127\.0\.0\.1:\d+/admin/", output)
    header = r"^ +claims +charts +digests\n( +done +failed +waiting){3} +jobs/s\n"
    assert re.search(header + r"(( +[\d,]+){10}\n)+", output, re.MULTILINE)


def test_admin_opens_every_page_of_the_flights_app(checked: tuple[DemoProject, str]) -> None:
    project, _ = checked
    statuses = project.evaluate(
        """
from django.apps import apps
from django.contrib.auth.models import User
from django.test import Client
from django.test.utils import setup_test_environment
from django.urls import reverse
setup_test_environment()
client = Client()
client.force_login(User.objects.get(username="admin"))
answer = {}
for model in apps.get_app_config("flights").get_models():
    name = f"admin:flights_{model._meta.model_name}"
    first = model.objects.first()
    pages = [reverse(f"{name}_changelist"), reverse(f"{name}_change", args=[first.pk])]
    answer[model.__name__] = [client.get(page).status_code for page in pages]
for value in ("yes", "assessed", "unassessed"):
    page = reverse("admin:flights_flight_changelist") + f"?badly_delayed={value}"
    answer[value] = [client.get(page).context["cl"].result_count]
"""
    )
    delayed, assessed, unassessed = (statuses.pop(value)[0] for value in ("yes", "assessed", "unassessed"))
    assert delayed == assessed + unassessed > assessed > 0
    assert len(statuses) == 8
    assert set(map(tuple, statuses.values())) == {(200, 200)}


def test_check_is_rejected_for_a_directory_that_is_not_empty(loaded_project: DemoProject) -> None:
    finished = loaded_project.run(*DEMO, "--check")
    assert finished.returncode == 1
    assert f"{loaded_project.var} is not empty" in finished.stderr


def test_differences_name_counts_that_do_not_match(loaded_project: DemoProject) -> None:
    differences = loaded_project.evaluate(
        """
from demo_project.demo.tally import differences, tally
answer = differences(tally(6000))
"""
    )
    assert "flights loaded: expected 6,000, found 5,000" in differences
    assert "airlines with a digest: expected 16, found 0" in differences
    assert "mails on disk: expected 16, found 0" in differences


def test_interrupt_stops_server_and_restart_continues_with_existing_data(
    checked: tuple[DemoProject, str], tmp_path: Path
) -> None:
    project = checked[0].copy(tmp_path / "var")
    output, address = run_until_done(project)
    with pytest.raises(URLError):
        page(address)
    assert_continued(project, output, "300")


@pytest.mark.thorough
def test_interrupt_stops_workers_and_restart_continues_with_their_results(project: DemoProject) -> None:
    first, address = run_until_done(project)
    assert "claims to assess" in first
    with pytest.raises(URLError):
        page(address)
    second, _ = run_until_done(project)
    assert_continued(project, second, "5,000")


def assert_continued(project: DemoProject, output: str, flights: str) -> None:
    assert f"{flights} flights are loaded already." in output
    assert "The season's work is enqueued already." in output
    assert len(list(on_disk(project.var / "mail"))) == 16


def run_until_done(project: DemoProject) -> tuple[str, str]:
    """Start the demo, interrupt it when its jobs are done, and return its output and its address."""
    with project.start(*DEMO) as demo:
        try:
            output = "".join(lines_until_done(demo))
            address = re.search(r"http://\S+/admin/", output)
            assert address, output
            assert b'name="username"' in page(address[0])
            assert page(urljoin(address[0], "/media/charts/ATL.png")).startswith(b"\x89PNG")
            demo.send_signal(signal.SIGINT)
            rest, _ = demo.communicate(timeout=TIMEOUT_SECONDS)
        finally:
            if demo.poll() is None:
                demo.terminate()
                demo.wait(TIMEOUT_SECONDS)
    assert demo.returncode == 130, output + rest
    return output + rest, address[0]


def lines_until_done(demo: subprocess.Popen[str]) -> Iterator[str]:
    assert demo.stdout is not None
    for line in demo.stdout:
        yield line
        if line.startswith("All jobs are done."):
            return


def page(address: str) -> bytes:
    with build_opener(ProxyHandler({})).open(address, timeout=PATIENCE) as response:
        return response.read()


def test_business_enqueues_letters_payments_and_workflows_and_deploys_releases(project: DemoProject) -> None:
    jobs, deployed = project.evaluate(
        """
from django.db.models import Count
from demo_project.demo.business import Business
from djqueue import Queue
from djqueue.models import CronJob, Job
deployed = []
business = Business(deployed.append)
business.begin()
for _ in range(91):
    business.go_on()
answer = [dict(Job.objects.values_list("queue").annotate(Count("id"))), deployed]
assert Queue("archive").is_paused() and CronJob.objects.count() == 4
"""
    )
    assert deployed == ["2.4.0"]
    # The workflow of a case has three jobs in `bookings`; that of the ratings has one, and 85 in `ratings`.
    assert jobs["bookings"] == 3 * 5 + 1
    assert jobs["ratings"] == 85
    assert jobs["archive"] == 12
    assert jobs["letters"] == 3 * 91 + 5
    assert jobs["payments"] > 91
