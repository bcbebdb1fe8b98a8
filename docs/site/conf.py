"""Sphinx settings of the documentation site. docs/site/build.py writes the pages that Sphinx reads."""

import sys
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import markup

project = "samplewise"
author = "the samplewise authors"
project_copyright = "the samplewise authors, MIT license"
version = release = installed("samplewise")

extensions = ["myst_parser", "sphinx.ext.viewcode", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "attrs_block"]
myst_heading_anchors = 4  # links such as page.md#heading, with the anchors that GitHub makes
highlight_language = "none"  # blocks without a language are output, tables and shell commands

# Names of other packages in signatures have no page here; every name of samplewise must have one.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!samplewise\b).*")]
add_module_names = True
python_maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"samplewise {release}"
html_static_path = ["static"]
templates_path = ["templates"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"sidebar_hide_name": False, "top_of_page_buttons": []}
# The order in which Furo's styles define them; Pygments has no style that is legible on both.
pygments_style = "tango"
pygments_dark_style = "monokai"


def fold_sidebar(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    context["furo_navigation_tree"] = markup.folded(context["furo_navigation_tree"])


def setup(app: Any) -> None:
    app.connect("html-page-context", fold_sidebar, priority=900)  # after Furo, which makes the tree with priority 500
