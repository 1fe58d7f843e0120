"""Version of the code behind a stage, for the keys under which its outputs are kept."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

_PACKAGE = "scgpu_tasks"
_PACKAGE_DIR = Path(__file__).parents[1]
# Messages and parsing of paths; neither can change a number.
_NOT_NUMERIC = frozenset(
    {f"{_PACKAGE}.errors", f"{_PACKAGE}.workdir", f"{_PACKAGE}.codeversion"}
)
_KERNEL_SOURCES = frozenset({".cu", ".cuh", ".h", ".hpp", ".cpp"})


@functools.cache
def code_version(*modules: str) -> str:
    """Digest of the code that given modules run, whatever its comments and layout.

    Follows imports of this package, those inside functions and by name included, and hashes
    what the compiler makes of them, without docstrings and line numbers. Device kernels kept in
    files of their own beside a followed module count byte by byte.

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
        seen[name], imported = _read_module(name, path)
        for extra in path.parent.iterdir():
            if extra.suffix in _KERNEL_SOURCES:
                seen[str(extra)] = hashlib.sha256(extra.read_bytes()).hexdigest()
        todo.extend(imported)
    return hashlib.sha256("\n".join(sorted(seen.values())).encode()).hexdigest()


@functools.cache
def _read_module(name: str, path: Path) -> tuple[str, tuple[str, ...]]:
    """Digest of one module's code, and what it imports of this package."""
    tree = ast.parse(path.read_bytes())
    wanted = {n for n in _imported(tree, name) if n.split(".")[0] == _PACKAGE}
    code = compile(_Bare().visit(tree), name, "exec", dont_inherit=True)
    digest = hashlib.sha256()
    for fact in _facts(code):
        digest.update(fact.encode())
    return digest.hexdigest(), tuple(sorted(wanted))


def _facts(code: CodeType) -> Iterator[str]:
    """Everything in a code object but where it stood."""
    yield repr((code.co_name, code.co_code, code.co_exceptiontable, code.co_flags))
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
    yield repr((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _facts(constant)
        elif isinstance(constant, frozenset):
            # Strings hash, and so sets of them are ordered, differently in every process.
            yield repr(sorted(map(repr, constant)))
        else:
            yield repr(constant)


class _Bare(ast.NodeTransformer):
    """Drop strings that stand alone, and put everything on one line.

    The compiler leaves marks where a line has no instruction of its own.
    """

    def generic_visit(self, node: Any) -> ast.AST:
        super().generic_visit(node)
        if hasattr(node, "lineno"):
            node.lineno = node.end_lineno = 1
            node.col_offset = node.end_col_offset = 0
        if getattr(node, "body", None) == []:
            node.body = [ast.Pass(lineno=1, end_lineno=1, col_offset=0, end_col_offset=0)]
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        return self.generic_visit(node)


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
