"""Settings of Sphinx: `make docs` turns this folder into pages (docs/_build), warnings being errors."""

project = "torch-trainer-kit"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = project
html_show_copyright = False
exclude_patterns = ["_build", "pictures"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
