"""The pages of the documentation, and the code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("deployments/*.md"))
)
# What can be run, and what is shown only.
RUN = {"python", "bash", "sh", "console"}
SHOWN = {"text", "yaml", "toml", "ini", "dockerfile", "json", "slurm", "{toctree}", "{include}"}
SHOWN |= {"{eval-rst}", "{figure}", "{image}"}

_FENCE = re.compile(r"^( *)(`{3,}|~{3,}|:{3,})(.*)$")
_NOT_RUN = re.compile(r"<!-- not run: (?P<why>.*?) -->\s*$", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code: where, in which language, and why it is not run, if so."""

    page: str
    line: int
    language: str
    code: str
    not_run: str | None


def blocks(page: str) -> list[Block]:
    """Blocks of code of a page, in their order."""
    lines = (ROOT / page).read_text("utf-8").splitlines()
    found = []
    at = 0
    while at < len(lines):
        opened = _FENCE.match(lines[at])
        if opened is None:
            at += 1
            continue
        indent, fence, language = opened.groups()
        end = at + 1
        while lines[end].strip() != fence:
            end += 1
        code = "\n".join(line.removeprefix(indent) for line in lines[at + 1 : end])
        before = "\n".join(lines[:at]).rstrip()
        reason = _NOT_RUN.search(before[-400:])
        why = reason["why"].strip() if reason else None
        found.append(Block(page, at + 2, language.strip().split(" ")[0], code, why))
        at = end + 1
    return found
