"""Ships the top-level `templates/djqueue` and `static/djqueue` inside the package.

A wheel gets copies. An editable install runs from the checkout, where Django looks for
`djqueue/templates` and `djqueue/static`, so it gets (git-ignored) links to the top-level folders.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = ("templates", "static")
PLUGIN = "djqueue/contrib/spark/plugin"
"""Shipped as `pyspark_djqueue`, too: by that name Spark finds it."""


class TopLevelFoldersHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        if version != "editable":
            build_data["force_include"][PLUGIN] = "pyspark_djqueue"
        for folder in FOLDERS:
            if version == "editable":
                self._link(folder)
            else:
                build_data["force_include"][f"{folder}/djqueue"] = f"djqueue/{folder}/djqueue"

    def _link(self, folder: str) -> None:
        link = Path(self.root, "djqueue", folder)
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            raise FileExistsError(f"{link} is in the way: files belong in the top-level {folder}/")
        link.symlink_to(Path("..", folder), target_is_directory=True)
