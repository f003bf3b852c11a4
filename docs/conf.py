"""Configuration of the site. ``make docs`` builds the site, and every warning is an error."""

import os
from pathlib import Path
import sys

import jtrees

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE), str(HERE.parent)]
# The notebook kernels of all pages must find the modules of this folder and the committed results.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The next build reuses compiled programs. The kernels ignore the IPython profile of the user.
BUILD = HERE.parent / "build"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(BUILD / "docs-programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
profile = BUILD / "docs-ipython" / "profile_default"
profile.mkdir(parents=True, exist_ok=True)
(profile / "ipython_kernel_config.py").write_text('c.IPKernelApp.log_level = "ERROR"\n', encoding="utf-8")
os.environ["IPYTHONDIR"] = str(profile.parent)

project = "jtrees"
author = "The jtrees authors"
copyright = "the jtrees authors, Apache-2.0"
version = release = jtrees.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "api",
]
exclude_patterns = ["_ext"]
suppress_warnings = ["config.cache"]

# --- Notebooks: MyST pages with code cells; each page runs in its own process, in an empty folder ---------------------
myst_enable_extensions = ["amsmath", "attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = os.environ.get("JTREES_DOCS_EXECUTE", "force")  # "cache" while writing, "off" for text only
suppress_warnings += ["myst-nb.lexer"] if nb_execution_mode == "off" else []
nb_execution_cache_path = str(BUILD / "docs-cache")
nb_execution_timeout = 120
nb_execution_show_tb = True  # a failing cell is a warning, so the build lists all failing cells
nb_execution_in_temp = True
nb_output_stderr = "error"  # a warning in a page is a warning of the build
copybutton_exclude = ".linenos, .gp, .go"

# --- Reference --------------------------------------------------------------------------------------------------------
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
nitpicky = True
# Only references to this library are checked. An inventory of another library would need the network.
nitpick_ignore_regex = [
    (r"py:(class|obj|data|exc)", r"(?!jtrees\.).*"),
    (r"py:(func|meth|mod)", r"(dataclasses|flax|jax|optax|sklearn)\b.*"),
    # Private types in signatures.
    (r"py:class", r"jtrees\.(\w+\.)+_\w+|jtrees\.pytree\.T"),
    (
        r"py:class",
        r"jtrees\.(tables\.(columns|frame|program|cells|inference|means)|data\.constraints|prediction|search\.(recipe|monitor)|ensembles\.boosted|leaves\.narrow)\.\w+",
    ),
    # Docstrings mention these names, which are not public.
    (r"py:(func|meth)", r"predict|hardened|linear_text|centre_thresholds|jtrees\.exact\.unit_splits"),
    (r"py:mod", r"jtrees\.(exact|processes|routing\.sharp)"),
]

# --- The look ---------------------------------------------------------------------------------------------------------
html_theme = "sphinx_book_theme"
html_title = "jtrees"
html_logo = html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "home_page_in_toc": True,
}
html_math_renderer = "mathml"
html_show_sourcelink = False
html_copy_source = False
