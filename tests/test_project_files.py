"""Files of the public project: one address, forms and hooks that work, links that lead somewhere."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

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
    paths = re.findall(r"`((?:djqueue|tests|tools|docs|demo_project|static|templates)(?:/[\w./-]+)?)`", text)

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
