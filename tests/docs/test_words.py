"""What the pages say about names and messages is true of the code."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import pytest
from numpydoc.docscrape import ClassDoc, FunctionDoc

from tests.docs.pages import ROOT

API = [
    f"scgpu_tasks.{name}"
    for name in re.findall(r"^   ([\w.]+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
]
# Names that users meet: those of the package, and those of the modules that it names.
MODULES = (
    "",
    ".qc",
    ".hvg",
    ".pca",
    ".cluster",
    ".records",
    ".io",
    ".io.convert",
    ".io.switch",
)
# Everything that these modules define and do not hide.
WHOLE_MODULES = (".specs", ".errors")


def load(name: str) -> Any:
    """Object by its full name; the module goes before a function of the same name."""
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        try:
            found = import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            found = getattr(found, part)
        return found
    raise LookupError(name)


def public() -> Iterator[tuple[str, Any]]:
    for suffix in MODULES:
        module = import_module(f"scgpu_tasks{suffix}")
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isclass(found) or inspect.isfunction(found):
                yield f"{module.__name__}.{name}", found
    for suffix in WHOLE_MODULES:
        module = import_module(f"scgpu_tasks{suffix}")
        for name, found in vars(module).items():
            mine = getattr(found, "__module__", None) == module.__name__
            is_callable = inspect.isclass(found) or inspect.isfunction(found)
            if mine and is_callable and not name.startswith("_"):
                yield f"{module.__name__}.{name}", found


def test_every_public_name_has_a_place_in_the_api_pages() -> None:
    listed = [load(name) for name in API]
    # A base class has no page of its own.
    missing = [name for name, found in public() if found not in listed and name[-5:] != ".Spec"]
    assert missing == [], "add these to docs/api.md, or take them out of __all__"


def described(doc: Any) -> set[str]:
    """Parameters and attributes that a docstring describes; ``a, b`` are two."""
    sections = ("Parameters", "Other Parameters", "Attributes")
    entries = [entry for section in sections for entry in doc.get(section, ())]
    return {
        name.strip().lstrip("*")
        for entry in entries
        if any(line.strip() for line in entry.desc)
        for name in entry.name.split(",")
    }


def parameters(found: Any) -> set[str]:
    if inspect.isclass(found) and issubclass(found, dict):
        return set()  # the keys of run.json are in pipeline.md
    return {name.lstrip("*") for name in inspect.signature(found).parameters} - {"self", "cls"}


@pytest.mark.parametrize("name", API)
def test_a_docstring_describes_every_parameter_and_no_other(name: str) -> None:
    found = load(name)
    assert inspect.getdoc(found), f"{name} has no docstring"
    if inspect.isclass(found):
        doc = ClassDoc(found, config={"show_class_members": False})
        # An exception without an __init__ of its own takes a message.
        own = issubclass(found, BaseException) and "__init__" not in vars(found)
        wanted = set() if own else parameters(found)
        surplus: set[str] = set()
    else:
        doc = FunctionDoc(found)
        wanted = parameters(found)
        surplus = described(doc) - wanted
        returns = inspect.signature(found).return_annotation
        assert returns in ("None", None) or doc["Returns"], f"{name} returns {returns}: what?"
    assert wanted - described(doc) == set(), "the docstring does not describe these"
    assert surplus == set(), "the docstring describes what is no parameter"


@cache
def messages() -> str:
    """All text in the package, names and numbers in it as ``…``."""
    found = []
    for path in sorted((ROOT / "scgpu_tasks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                ]
                found.append("".join(parts))
    return re.sub(r"\s+", " ", "\n".join(found))


HEADINGS = re.findall(
    r"^### (.*`.*)$", (ROOT / "docs/troubleshooting.md").read_text("utf-8"), re.MULTILINE
)


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_message_to_search_for_is_one_that_the_code_has(heading: str) -> None:
    for message in re.findall(r"`([^`]+)`", heading):
        for part in re.split(r"…|PREFECT_API_URL", message):
            words = part.strip(" ;,")
            assert not words or words in messages(), f"no such message: {words}"
