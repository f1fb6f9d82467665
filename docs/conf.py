"""The site, which `make docs` builds. Its reference is written from the code on every build."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_site"))

import mathml  # noqa: E402  (of _site)
import reference  # noqa: E402

project = "sigmerge"
author = "the authors of sigmerge"
try:
    release = metadata.version("sigmerge-llm")
except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
    release = ""
html_title = f"{project} {release}".strip()
extensions = ["myst_parser"]
root_doc = "index"
exclude_patterns = ["_site", "**/.sigmerge"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
nitpicky = True
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = html_show_copyright = False
html_theme_options = {"top_of_page_buttons": []}
html_math_renderer = "mathml"


def setup(app: Any) -> None:
    reference.write(HERE / "reference")
    app.add_html_math_renderer("mathml", (mathml.inline, None), (mathml.block, None))
