"""The peers' own environments: virtual environments and node folders, made with pip and npm as configured."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

TIMEOUT = 600
"""Seconds that an installation may take."""


class NotInstallableError(Exception):
    """A peer cannot be installed on this machine; the message says why."""


@dataclass(frozen=True)
class Environment:
    """Where a peer is installed."""

    folder: Path
    versions: dict[str, str] = field(default_factory=dict)
    """By package."""
    runtime: str = ""
    """The program that runs it, such as a Python or a node."""


def cache_folder() -> Path:
    """Return the folder in which the peers are installed, and stay."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "djqueue" / "peers"


def python_environment(name: str, packages: tuple[str, ...]) -> Environment:
    """Return a virtual environment with some packages, made unless it is there."""
    folder = cache_folder() / name
    python = folder / "bin" / "python"
    if not made(folder, packages):
        run([sys.executable, "-m", "venv", str(folder)])
        run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
        remember(folder, packages)
    listed = run([str(python), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"])
    versions = {normal(one["name"]): one["version"] for one in json.loads(listed)}
    return Environment(folder, versions, str(python))


def node_environment(name: str, packages: tuple[str, ...], node: tuple[int, ...] | None) -> Environment:
    """Return a folder with some packages of npm, made unless it is there.

    node: The oldest version of Node.js that will do; None for those that run on Bun.
    """
    if shutil.which("npm") is None:
        raise NotInstallableError("npm is not installed")
    folder = cache_folder() / name
    if node is not None and node_version("node") < node:
        packages = (*packages, f"node-{sys.platform}-{architecture()}@{node[0]}")
    elif node is None:
        packages = (*packages, "bun")
    if not made(folder, packages):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}\n')
        run(["npm", "install", "--no-audit", "--no-fund", *packages], folder)
        remember(folder, packages)
    modules = folder / "node_modules"
    versions = {}
    for package in packages:
        plain = re.sub(r"(?<=.)@.*", "", package)
        found = json.loads((modules / plain / "package.json").read_text())
        versions["node" if plain.startswith("node-") else plain] = str(found["version"])
    own = [
        modules / package / "bin" / "node" for package in os.listdir(modules) if package.startswith("node-")
    ]
    own = [path for path in own if path.exists()]
    runtime = str(modules / ".bin" / "bun") if node is None else str(own[0]) if own else "node"
    if node is not None:
        versions["node"] = ".".join(map(str, node_version(runtime)))
    run([runtime, "--version"])
    return Environment(folder, versions, runtime)


def node_version(program: str) -> tuple[int, ...]:
    """Return the version of a Node.js; nothing if there is none."""
    if shutil.which(program) is None:
        return ()
    return tuple(map(int, re.findall(r"\d+", run([program, "--version"]))[:3]))


def architecture() -> str:
    machine = platform.machine().lower()
    return {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64"}.get(machine, machine)


def made(folder: Path, packages: tuple[str, ...]) -> bool:
    """Return whether a folder has these packages; one that has others is removed."""
    stamp = folder / "installed.json"
    if stamp.exists() and json.loads(stamp.read_text()) == list(packages):
        return True
    shutil.rmtree(folder, ignore_errors=True)
    return False


def remember(folder: Path, packages: tuple[str, ...]) -> None:
    (folder / "installed.json").write_text(json.dumps(packages))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def run(command: list[str], folder: Path | None = None) -> str:
    """Run a command, and return what it printed."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstallableError(str(error)) from error
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise NotInstallableError(
            f"{Path(command[0]).name} failed: {lines[-1] if lines else done.returncode}"
        )
    return done.stdout
