"""A few small reads of every kind, for compute-sanitizer.

compute-sanitizer --tool memcheck python -m tests.gpu.small_read FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from scgpu_tasks.errors import CorruptChunkError
from tests.gpu.damage_run import make
from tests.gpu.read_helpers import PROTOTYPE, open_gpu, reads_as
from tests.io.damage import damage
from tests.io.read_cases import CHAINS, draw_case, draw_selection, expect, read, seeded


def main() -> None:
    folder = Path(sys.argv[1])
    for seed in range(25):
        draw = seeded(seed)
        case = draw_case(draw, folder / f"a{seed}")
        array = open_gpu(case.path, case.order)
        for _ in range(6):
            kind, selection = draw_selection(draw, case.values.shape)
            if not reads_as(array, kind, selection, expect(case.values, kind, selection)):
                raise SystemExit(f"wrong values: {seed}, {kind}, {selection}")
    found = 0
    for seed, name in enumerate([*CHAINS] * 4):
        path, _ = make(folder / f"d{seed}", name)
        damage(seeded(seed), sorted((path / "c").iterdir()), 8)
        try:
            read(open_gpu(path), "basic", (slice(None),), PROTOTYPE)
        except CorruptChunkError:
            found += 1
    print(f"done, {found} damaged arrays found")


if __name__ == "__main__":
    main()
