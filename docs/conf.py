"""Sphinx's settings; `make docs` builds with warnings as errors."""

from importlib.metadata import version as version_of

project = "djqueue"
author = "djqueue contributors"
project_copyright = "djqueue contributors"
version = release = version_of("djqueue")

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"djqueue {release}"
