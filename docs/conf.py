"""How the site is built: `make docs`, or `sphinx-build -W docs docs/_build/html`.  Nothing is fetched while it builds."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONWARNINGS"] = "ignore"

import inventories  # noqa: E402
from sphinx_gallery.sorting import FileNameSortKey  # noqa: E402

import implicitkit as ik  # noqa: E402

project, author, copyright = "implicitkit", "implicitkit contributors", "implicitkit contributors, MIT licence"
version = release = ik.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "docstrings",
    "formulas",
    "page_lists",
    "api_pages",
    "script_pages",
    "benchmark_page",
    "module_page",
    "breaks",
]
exclude_patterns = ["_build", "inventories", "**/sg_execution_times.rst", "gallery/*.md5"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3
highlight_language = "python"
default_role = "literal"
nitpicky = False
suppress_warnings = ["config.cache"]

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

intersphinx_mapping = inventories.mapping(HERE / "inventories", HERE / "_build" / "inventories")

html_math_renderer = "mathml"
html_theme = "pydata_sphinx_theme"
html_title = "implicitkit"
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_sidebars = {"index": [], "reading": [], "errata": []}
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}

copybutton_exclude = ".linenos, .gp, .go"

sphinx_gallery_conf = {
    "examples_dirs": ["../examples/gallery"],
    "gallery_dirs": ["gallery"],
    "filename_pattern": r"\.py$",
    "within_subsection_order": FileNameSortKey,
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 1e9,
    "plot_gallery": True,
    "only_warn_on_example_error": True,  # the site is there all the same; with -W the build fails at its end
    "remove_config_comments": True,
    "image_scrapers": ("matplotlib",),
    "reset_modules": ("matplotlib", "fresh.torch_settings", "fresh.colours", "fresh.errors"),
    "capture_repr": (),
}

warnings.filterwarnings("ignore", category=UserWarning, module="matplotlib")
