"""Settings of the documentation's site: `make docs` builds it in `build/site`.

Sphinx reads the repository's root: pages are the files that a host of the repository shows. Their links to
pages, headings and source files are checked where they are written. No step needs a network.
"""

project = "pensieve-jax"
author = "the pensieve-jax authors"
copyright = "the pensieve-jax authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/site/index"
include_patterns = [
    "docs/*.md",
    "docs/site/*.md",
    "lab/docs/*.md",
    "lab/log/*.md",
    "pensieve_jax/chat_model/README.md",
    "examples/README.md",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
# Sphinx enters no directory that this names.
exclude_patterns = ["**/.*", "build", "tests", "lab/results", "lab/tests"]

myst_heading_anchors = 4

# An attribute is described in its class, not twice.
napoleon_use_ivar = True
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}

html_theme = "furo"
html_title = "pensieve-jax"
html_show_copyright = False
html_show_sphinx = False
