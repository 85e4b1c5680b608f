# SPDX-License-Identifier: Apache-2.0
"""Build the site with Sphinx: `make docs`. Pages are Markdown; the API reference comes from the docstrings."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "extensions")]

import fpipe  # noqa: E402

project = "fpipe"
author = "the fpipe authors"
project_copyright = "the fpipe authors, Apache License 2.0"
release = version = fpipe.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
add_module_names = False
autodoc_preserve_defaults = True
smartquotes = False  # docstrings quote code

html_theme = "furo"
html_title = f"fpipe {release}"
html_show_sphinx = False
