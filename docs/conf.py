"""Sphinx's settings; `make docs` builds with warnings as errors."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

from djqueue import __version__  # noqa: E402 - found by the line above

project = "djqueue"
author = "djqueue contributors"
project_copyright = "djqueue contributors"
version = release = __version__

extensions = ["myst_parser", "transitions"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_ext", "_internal"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_static_path = ["_static"]
html_title = f"djqueue {release}"
