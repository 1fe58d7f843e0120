"""How Sphinx builds the documentation: ``make docs``."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import scgpu_tasks

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # flows/ is no package

project = "scgpu_tasks"
author = "the scgpu_tasks authors"
copyright = f"2026, {author}"  # noqa: A001 - Sphinx's name
version = release = scgpu_tasks.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# One parameter a line: signatures with types are long.
maximum_signature_line_length = 70
numpydoc_show_class_members = False
default_role = "py:obj"

html_theme = "furo"
html_title = f"scgpu_tasks {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp, .go"

_UNDERLINE = re.compile(r"-{3,}$")


def give_returns_their_type(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Turn prose under Returns into numpydoc's form, the type being that of the signature.

    Docstrings here describe what comes back and leave its type to the annotation; numpydoc
    takes the first line for a type.
    """
    for i in range(len(lines) - 1):
        if lines[i].strip() == "Returns" and _UNDERLINE.match(lines[i + 1].strip()):
            break
    else:
        return
    end = start = i + 2
    while end < len(lines) and not (
        end + 1 < len(lines) and _UNDERLINE.match(lines[end + 1].strip())
    ):
        end += 1
    with contextlib.suppress(TypeError, ValueError):
        kind = inspect.signature(obj).return_annotation
        kind = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
        lines[start:end] = [kind, *(f"    {line}" if line else "" for line in lines[start:end])]


def spell_out_progress(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Write the stages' type of `progress` out; the class of that name is the conversion's."""
    if not signature or "convert" in name:
        return None
    return signature.replace(": Progress", ": Callable[[int, int], None]"), returns


class CommandHelp(SphinxDirective):
    """``.. command-help:: module:function ARGUMENTS``: what ``--help`` prints."""

    required_arguments = 1
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Call the parser in this process, as wide as the page."""
        module, _, function = self.arguments[0].partition(":")
        words = self.arguments[1].split() if len(self.arguments) > 1 else []
        printed = io.StringIO()
        os.environ["COLUMNS"] = "88"
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            getattr(importlib.import_module(module), function)([*words, "--help"])
        text = printed.getvalue()
        if not text.startswith("usage:"):
            message = f"{self.arguments[0]} printed no help"
            raise self.error(message)
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> None:
    """Register the above; before numpydoc, which has the default priority."""
    app.connect("autodoc-process-docstring", give_returns_their_type, priority=100)
    app.connect("autodoc-process-signature", spell_out_progress)
    app.add_directive("command-help", CommandHelp)
