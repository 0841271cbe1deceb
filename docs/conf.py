"""Sphinx configuration: Markdown pages, the API from the docstrings, and no network."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

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
html_css_files = ["tables.css"]
html_show_sourcelink = False


# What a page's mark is replaced by: printed by a package, so that the page cannot be stale.
PRINTED = {
    "rules": ("paged_schema", "rules", "--markdown"),
    "kernels": ("paged_cuda", "table", str(Path(__file__).parent / "measurements" / "kernel-resources.json")),
}


def insert_printed(app: Sphinx, name: str, source: list[str]) -> None:
    """Put what a package prints into the page that asks for it."""
    if name in PRINTED:
        command = [sys.executable, "-m", *PRINTED[name]]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        source[0] = source[0].replace(f"<!-- {name} -->", printed)


def draw_records(app: Sphinx, error: Exception | None) -> None:
    """Draw the records beside the built pages; a picture that a page shows and nobody drew is an error."""
    if error is not None or app.builder.name != "html":
        return
    out, folder = Path(app.outdir) / "report", Path(__file__).parent / "measurements"
    records = sorted(path for path in folder.glob("*.json") if path.name != "kernel-resources.json")
    command = [sys.executable, "-m", "paged_bench", "report", *map(str, records), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    shown = set(re.findall(r"\.\./report/([\w.-]+)", (folder / "pictures.md").read_text(encoding="utf-8")))
    missing = shown - {path.name for path in out.iterdir()}
    if missing:
        raise ExtensionError(f"pictures.md shows {', '.join(sorted(missing))}, which no record has data for")


def setup(app: Sphinx) -> None:
    """Register the hooks."""
    app.connect("source-read", insert_printed)
    app.connect("build-finished", draw_records)
