"""Sphinx configuration: Markdown pages, the API from the docstrings, and no network."""

import importlib.metadata
import subprocess
import sys

from sphinx.application import Sphinx

project = "paged attention"
author = "the paged-attention contributors"
release = version = importlib.metadata.version("paged-schema")
project_copyright = "2026, " + author

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
default_role = "code"  # single backticks in a docstring are code
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"paged attention {version}"
html_static_path = ["_static"]
html_show_sourcelink = False


def insert_rules(app: Sphinx, name: str, source: list[str]) -> None:
    """Put the rules into their page; they are printed by the package, so that the page cannot be stale."""
    if name == "rules":
        command = [sys.executable, "-m", "paged_schema", "rules", "--markdown"]
        rules = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        source[0] = source[0].replace("<!-- rules -->", rules)


def setup(app: Sphinx) -> None:
    """Register the hook."""
    app.connect("source-read", insert_rules)
