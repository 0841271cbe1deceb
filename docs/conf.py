"""Sphinx configuration: Markdown pages, the API from the docstrings, and no network."""

import importlib.metadata

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
