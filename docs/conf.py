"""The site of the documentation: ``sphinx-build -W -b html docs build/docs``."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import class_examples  # noqa: E402, found through the path above

import fl_lightning  # noqa: E402

project, author, release = "fl_lightning", "the fl_lightning developers", fl_lightning.__version__
copyright = f"{author}, Apache-2.0"
html_title = f"fl_lightning {release}"
html_theme = "furo"
# the last one lets pages with formulas have their typesetter with them, instead of fetching it
extensions = [
    # pages in Markdown, and notebooks with the outputs that they have in the repository
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx-mathjax-offline",
]
exclude_patterns = ["build"]
nb_execution_mode = "off"
nb_merge_streams = True
# a page's own headings can be linked, as a code host does it
myst_heading_anchors = 3
# formulas between $ and $$, as a code host takes them
myst_enable_extensions = ["dollarmath"]
# Lightning's own docstrings would not pass: neither inherited members nor inherited docstrings are shown
autodoc_inherit_docstrings = False
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_class_signature = "mixed"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# an argument's name may end with _, as lambda_ does
strip_signature_backslash = True
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["sort.js"]
# the site works from disk
html_copy_source = False
html_show_sourcelink = False


def link_files(app, page, source):
    """Copy a page of another folder, such as the page of results, into the site as a file."""
    outside = re.escape("../" * (page.count("/") + 1))
    source[0] = re.sub(rf"\]\(({outside}[^.)#][^)#]*\.md)\)", r"](path:\1)", source[0])


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", link_files)
    # after napoleon, which has made fields of the docstring's arguments
    app.connect("autodoc-process-docstring", class_examples.add_example, priority=900)
