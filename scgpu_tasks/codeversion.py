"""Version of the code behind a stage, for the keys under which its outputs are kept."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = "scgpu_tasks"
_PACKAGE_DIR = Path(__file__).parent
# Messages and parsing of paths; neither can change a number.
_NOT_NUMERIC = frozenset(
    {f"{_PACKAGE}.errors", f"{_PACKAGE}.workdir", f"{_PACKAGE}.codeversion"}
)
_KERNEL_SOURCES = frozenset({".cu", ".cuh", ".h", ".hpp", ".cpp"})


@functools.cache
def code_version(*modules: str) -> str:
    """Digest of the code that given modules run, whatever its comments and layout.

    Follows imports of this package, those inside functions and by name included, and hashes
    the syntax trees without docstrings. Device kernels kept in files of their own beside a
    followed module count byte by byte.

    Parameters
    ----------
    modules
        Full names such as ``scgpu_tasks.stages.qc``.
    """
    todo, seen = list(modules), dict[str, str]()
    while todo:
        name = todo.pop()
        if name in seen or name in _NOT_NUMERIC:
            continue
        path = _module_file(name)
        if path is None:
            continue
        tree = ast.parse(path.read_bytes())
        seen[name] = hashlib.sha256(ast.dump(_Bare().visit(tree)).encode()).hexdigest()
        for extra in path.parent.iterdir():
            if extra.suffix in _KERNEL_SOURCES:
                seen[str(extra)] = hashlib.sha256(extra.read_bytes()).hexdigest()
        todo.extend(_imported(tree, name))
    return hashlib.sha256("\n".join(sorted(seen.values())).encode()).hexdigest()


class _Bare(ast.NodeTransformer):
    """Drop strings that stand alone: docstrings and notes on attributes."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        return node


def _module_file(name: str) -> Path | None:
    if name != _PACKAGE and not name.startswith(f"{_PACKAGE}."):
        return None
    base = _PACKAGE_DIR.joinpath(*name.split(".")[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _imported(tree: ast.AST, module: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.rsplit(".", node.level)[0]
                base = f"{parent}.{base}".rstrip(".")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith(f"{_PACKAGE}.")
        ):
            # A module loaded by name, as importlib takes it.
            yield node.value.partition(":")[0]
