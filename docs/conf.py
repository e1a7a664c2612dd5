"""Settings of the documentation: `make docs` builds it into site/."""

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "powernorm"
author = "The powernorm developers"
copyright = author  # noqa: A001 - Sphinx's name
release = version = metadata.version("powernorm")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "reference",
    "mathml",
    "number_columns",
    "themed_pictures",
]
exclude_patterns = ["_extensions", "_static"]

# Pages are Markdown that GitHub shows as well. Anchors are those of GitHub, checked in every link.
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_dmath_double_inline = True
suppress_warnings = ["myst.header"]

# Text in `backticks` in docstrings is a name if there is one, else code.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_display_short_literal_types = True
maximum_signature_line_length = 72
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Shape", "State", "Numerics", "Distributed", "Fidelity"]

highlight_language = "none"
pygments_style = "default"
pygments_dark_style = "monokai"
copybutton_exclude = ".linenos, .gp, .go"

html_title = "powernorm"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_math_renderer = "mathml"
html_theme_options = {"navigation_with_keys": True}
