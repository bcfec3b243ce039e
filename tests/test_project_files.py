"""Files of the public project: one address, forms and hooks that work, links that lead somewhere."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import djqueue
from tests.docs.pages import anchors

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URLS = PROJECT["urls"]
POLICIES = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")]
GITHUB = sorted((ROOT / ".github").rglob("*.*"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
TOP_LEVEL = {
    *(".ci", ".github", ".gitignore", ".pre-commit-config.yaml", ".readthedocs.yaml"),
    *(
        "CHANGELOG.md",
        "CODE_OF_CONDUCT.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "README.md",
        "SECURITY.md",
    ),
    *(
        "demo_project",
        "deploy",
        "djqueue",
        "docs",
        "hatch_build.py",
        "pyproject.toml",
        "scripts",
        "static",
        "templates",
    ),
    *("tests", "tools"),
}


def test_top_level_of_the_repository_has_only_known_names() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert {path.split("/")[0] for path in listed.splitlines()} <= TOP_LEVEL


@pytest.mark.parametrize("path", [ROOT / "README.md", *POLICIES, *GITHUB], ids=lambda path: path.name)
def test_addresses_of_the_project_are_those_of_its_metadata(path: Path) -> None:
    known = (URLS["Source"], URLS["Documentation"].rstrip("/"))
    found = re.findall(
        r"https://(?:raw\.)?github[\w.]*/[\w./-]+|https://[\w-]+\.readthedocs\.io[\w./-]*", path.read_text()
    )

    ours = [url for url in found if "djqueue" in url]
    raw = URLS["Source"].replace("https://github.com", "https://raw.githubusercontent.com")
    assert [url for url in ours if not url.startswith((*known, raw))] == []


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.name)
def test_links_between_files_of_the_repository_lead_somewhere(path: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()) if "://" not in link]

    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


def test_contributing_names_targets_and_folders_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    paths = re.findall(
        r"`((?:djqueue|tests|tools|docs|demo_project|deploy|static|templates)(?:/[\w./-]+)?)`", text
    )

    assert len(paths) > 10
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []
    assert set(re.findall(r"`make ([a-z-]+)`|^    make ([a-z-]+)", text, re.MULTILINE)) <= {
        pair for target in targets for pair in ((target, ""), ("", target))
    }


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_have_what_github_requires(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert all({*link} == {"name", "url", "about"} for link in form["contact_links"])
        return

    assert form["name"]
    assert form["description"]
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0
    for field in form["body"]:
        assert field["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        assert field["attributes"]["value" if field["type"] == "markdown" else "label"]


def test_hooks_run_the_commands_of_make_lint() -> None:
    [repository] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    rules = (ROOT / "Makefile").read_text()
    [lint] = re.findall(r"^lint:.*\n((?:\t.*\n)+)", rules, re.MULTILINE)
    wanted = [line.strip().replace("$(BIN)/", "").split()[:2] for line in lint.splitlines()]

    hooks = [hook["entry"].removeprefix(".venv/bin/").split()[:2] for hook in repository["hooks"]]
    assert hooks == wanted
    assert all(hook["language"] == "system" for hook in repository["hooks"])


def test_read_the_docs_builds_like_make_docs() -> None:
    build = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())

    assert (ROOT / build["sphinx"]["configuration"]).exists()
    assert build["sphinx"]["fail_on_warning"]  # `make docs` passes -W
    [install] = build["python"]["install"]
    assert {*install["extra_requirements"]} <= {*PROJECT["optional-dependencies"]}


# Workflows.

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_actions_and_keep_no_credentials(path: Path) -> None:
    text = path.read_text()
    steps = [step for job in yaml.safe_load(text)["jobs"].values() for step in job.get("steps", ())]
    used = [step["uses"] for step in steps if "uses" in step]

    pinned = re.findall(r"uses: ([\w./-]+@[0-9a-f]{40}) # v\d+\.\d+\.\d+$", text, re.MULTILINE)
    assert pinned == used
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"] == {"persist-credentials": False} for step in checkouts)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_have_the_smallest_permissions(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    triggers = workflow[True]  # what YAML 1.1 makes of "on"

    assert "pull_request_target" not in triggers
    assert workflow["permissions"] in ({}, {"contents": "read"})
    writing = {
        name: {right for right, kind in job.get("permissions", {}).items() if kind == "write"}
        for name, job in workflow["jobs"].items()
    }
    allowed = {"attest": {"id-token", "attestations"}, "publish": {"id-token"}, "announce": {"contents"}}
    assert {name: rights for name, rights in writing.items() if rights} == (
        allowed if path.stem == "release" else {}
    )


def test_commands_of_workflows_contain_no_values_of_events() -> None:
    """GitHub inserts `${{ }}` into a script as text, so a title or branch could run commands."""
    jobs = [job for path in WORKFLOWS for job in yaml.safe_load(path.read_text())["jobs"].values()]
    scripts = [step["run"] for job in jobs for step in job.get("steps", ()) if "run" in step]

    assert len(scripts) > 5
    assert [script for script in scripts if "${{" in script] == []
    assert len({script for script in scripts if "sudo" in script}) == 1  # the servers of the tests


def test_ci_runs_on_the_versions_of_the_metadata() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"][
        "matrix"
    ]
    named = [one.rpartition(" :: ") for one in PROJECT["classifiers"]]

    for key, lead in (("python", "Programming Language :: Python"), ("django", "Framework :: Django")):
        versions = [last for before, _, last in named if before == lead and re.fullmatch(r"\d+\.\d+", last)]
        assert matrix[key] == versions


# The release.


def test_changelog_has_a_section_for_the_version_and_one_for_changes_to_come() -> None:
    heads = re.findall(r"^## \[([\w.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert heads[:2] == ["Unreleased", djqueue.__version__]


def test_readme_has_absolute_links_to_pages_and_files_that_exist() -> None:
    """PyPI shows the README without the repository around it."""
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    links = [inline or defined for inline, defined in links]
    docs = URLS["Documentation"] + "en/latest/"
    source = URLS["Source"] + "/blob/main/"
    raw = URLS["Source"].replace("https://github.com", "https://raw.githubusercontent.com") + "/main/"

    assert [link for link in links if not link.startswith("https://")] == []
    assert any(link.startswith(raw) for link in links), "no picture"
    for link in links:
        if link.startswith(docs) and link != docs:
            page, _, anchor = link.removeprefix(docs).partition("#")
            path = ROOT / "docs" / page.replace(".html", ".md")
            assert path.exists(), link
            assert not anchor or anchor in anchors(path), link
        for lead in (source, raw):
            if link.startswith(lead):
                assert (ROOT / link.removeprefix(lead)).exists(), link
