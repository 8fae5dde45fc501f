"""Sphinx's configuration of the site that ``make docs`` builds; ``tools/docs_site.py`` lays its pages out."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of this file in the tree; tools/docs_site.py runs Sphinx with it (`-c`)

project = "elastic_rs"
author = "the authors of elastic_rs"
version = release = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
html_title = f"elastic_rs {version}"

extensions = ["myst_parser", "sphinx_design"]
source_suffix = {".md": "markdown"}
root_doc = "index"
myst_enable_extensions = ["colon_fence", "attrs_block"]
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # GitHub's pages may begin at any level

html_theme = "furo"
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
