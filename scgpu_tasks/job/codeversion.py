"""Version of the code behind a stage, for the keys under which its outputs are kept."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

_PACKAGE = "scgpu_tasks"
_PACKAGE_DIR = Path(__file__).parents[1]
# Rooms that say where and when a stage runs, and not what it computes. The package itself and
# conversions are reached by names that rooms below them hand on.
_NOT_NUMERIC = tuple(
    f"{_PACKAGE}.{room}"
    for room in ("errors", "cluster", "io.convert", "job", "tasks", "flowrun", "operate")
)
_KERNEL_SOURCES = frozenset({".cu", ".cuh", ".h", ".hpp", ".cpp"})


@functools.cache
def code_version(*modules: str) -> str:
    """Digest of the code that given modules run, whatever its comments and layout.

    Follows imports of this package, those inside functions and by name included, and hashes
    what the compiler makes of them, without docstrings and line numbers. Rooms that change no
    number are left out, unless they are named. Device kernels kept in files of their own beside
    a followed module count byte by byte.

    Parameters
    ----------
    modules
        Full names such as ``scgpu_tasks.stages.qc``.
    """
    todo, seen = list(modules), dict[str, str]()
    while todo:
        name = todo.pop()
        if name in seen or (name not in modules and _is_not_numeric(name)):
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


def _is_not_numeric(name: str) -> bool:
    return name == _PACKAGE or f"{name}.".startswith(tuple(f"{n}." for n in _NOT_NUMERIC))


@functools.cache
def _read_module(name: str, path: Path) -> tuple[str, tuple[str, ...]]:
    """Digest of one module's code, and what it imports of this package."""
    tree = ast.parse(path.read_bytes())
    nodes = _make_bare(tree)
    wanted = {n for n in _imported(nodes, name) if n.split(".")[0] == _PACKAGE}
    code = compile(tree, name, "exec", dont_inherit=True)
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


def _make_bare(tree: ast.Module) -> list[ast.AST]:
    """Drop strings that stand alone, put everything on one line, and return all nodes.

    The compiler leaves marks where a line has no instruction of its own.
    """
    place = {"lineno": 1, "end_lineno": 1, "col_offset": 0, "end_col_offset": 0}
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        fields = node.__dict__
        if "lineno" in fields:
            fields.update(place)
        for name, value in fields.items():
            if isinstance(value, list):
                if name in ("body", "orelse", "finalbody"):
                    value[:] = [n for n in value if not _is_text(n)]
                    if name == "body" and not value:
                        value.append(ast.Pass(**place))
                nodes.extend(n for n in value if isinstance(n, ast.AST))
            elif isinstance(value, ast.AST):
                nodes.append(value)
    return nodes


def _is_text(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _module_file(name: str) -> Path | None:
    if name != _PACKAGE and not name.startswith(f"{_PACKAGE}."):
        return None
    base = _PACKAGE_DIR.joinpath(*name.split(".")[1:])
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _imported(nodes: list[ast.AST], module: str) -> Iterator[str]:
    for node in nodes:
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
