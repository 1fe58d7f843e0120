"""Take the picture of a report that the home page shows; needs Chromium.

``python docs/figures/report_page.py RECORD`` writes ``docs/images/report.png``: the top of
``RECORD/report.html``. The one that is shown is of the atlas of ``python -m scgpu_tasks.demo``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SIZE = (1200, 1222)
"""Width and height in pixels: down to the end of what the report says of the cells."""


def main() -> None:
    """Open the report in Chromium without a window."""
    report = Path(sys.argv[1]).resolve() / "report.html"
    picture = Path(__file__).parents[1] / "images" / "report.png"
    options = ["--headless=new", "--no-sandbox", "--hide-scrollbars"]
    options += [f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={picture}"]
    subprocess.run(["chromium", *options, report.as_uri()], check=True, capture_output=True)
    print(picture)


if __name__ == "__main__":
    main()
