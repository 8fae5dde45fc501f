"""Sphinx's configuration of the site that ``make docs`` builds; ``tools/docs_site.py`` lays its pages out."""

import json
import os

from docutils import nodes
from sphinx.application import Sphinx

project = "elastic_rs"
author = "the authors of elastic_rs"
# tools/docs_site.py says which release the pages are of, and which others are built beside it.
version = release = os.environ["ELASTIC_RS_DOCS_VERSION"]
html_title = f"elastic_rs {version}"

extensions = ["myst_parser", "sphinx_design"]
source_suffix = {".md": "markdown"}
root_doc = "index"
myst_enable_extensions = ["colon_fence", "attrs_block"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # GitHub's pages may begin at any level

html_theme = "furo"
templates_path = ["_templates"]
html_context = {"versions": json.loads(os.environ.get("ELASTIC_RS_DOCS_VERSIONS", "[]"))}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {
    "source_repository": "https://github.com/elastic-rs/elastic_rs/",
    "source_branch": "main",
    "source_directory": "docs/",
    "top_of_page_buttons": [],
}
pygments_style = "friendly"
pygments_dark_style = "monokai"


def keep_together(_app: Sphinx, doctree: nodes.document, _page: str) -> None:
    """Let no line break within a short name: browsers break flags behind their dashes."""
    for literal in doctree.findall(nodes.literal):
        if len(literal.astext()) <= 28:
            literal["classes"].append("short")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("doctree-resolved", keep_together)
