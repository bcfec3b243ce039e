"""The oldest supported versions, which `make test-compat` installs: scripts/oldest.txt and pyproject.toml."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
NOT_INSTALLED = {"dev", "docs", "spark", "test"}
"""Extras that the lane leaves out: tools, and Spark, which `make test-spark` tests."""


def minimums() -> dict[str, Version]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [lines for name, lines in project["optional-dependencies"].items() if name not in NOT_INSTALLED]
    found: dict[str, Version] = {}
    for line in [*project["dependencies"], *(line for lines in extras for line in lines)]:
        required = Requirement(line)
        [minimum] = [each.version for each in required.specifier if each.operator == ">="]
        assert found.setdefault(required.name, Version(minimum)) == Version(minimum), required.name
    return found


def test_compat_lane_installs_the_minimum_version_of_every_dependency():
    lines = (ROOT / "scripts" / "oldest.txt").read_text().splitlines()
    pinned = dict(re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups() for line in lines if line[:1] != "#")

    assert {name: Version(version) for name, version in pinned.items()} == minimums()
