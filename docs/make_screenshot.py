"""Make the picture of a report that the README and the site's first page show, ``docs/report.png``.

python docs/make_screenshot.py [--output FILE] [--browser PROGRAM]

The report shows the stored cells of ``experiments/front/suite.yaml``, sorted by accuracy, with the values of a
round as a reader sees them who points at the curves. It needs Chromium or Chrome, and ``pip install playwright``, which
drives it; nothing is fetched.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SUITE, CELLS = (ROOT / "experiments" / "front" / name for name in ("suite.yaml", "front-suite.cells.csv"))
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# of the window
WIDTH, HEIGHT = 1100, 3000


def picture(page: Path, browser: str) -> bytes:
    """The heading, the results and the curves of the first setting of a report, as PNG."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        tab = running.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        tab.goto(page.as_uri())
        section = tab.locator("section[id^=section-]").first
        figure = section.locator("figure").first
        # downwards is the second click
        for _ in range(2):
            section.locator("table").first.locator("button.sort").nth(1).click()
        section.evaluate("section => scrollTo(0, section.offsetTop)")
        figure.locator("svg[data-axes]").first.hover()
        begins, ends = section.bounding_box(), figure.bounding_box()
        height = ends["y"] + ends["height"] - begins["y"] + 12
        shot = tab.screenshot(clip={"x": 0, "y": begins["y"], "width": WIDTH, "height": height})
        running.close()
    return shot


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "report.png", help="file of the picture")
    parser.add_argument("--browser", help=f"program of the browser; default: the first there is of {BROWSERS}")
    options = parser.parse_args()
    browser = (
        shutil.which(options.browser) if options.browser else next(filter(None, map(shutil.which, BROWSERS)), None)
    )
    if browser is None:
        sys.exit(f"there is no browser {options.browser or ' or '.join(BROWSERS)} here; give --browser PROGRAM")

    from fl_lightning.report.page import make_report
    from fl_lightning.report.sources import read_sources

    with tempfile.TemporaryDirectory() as folder:
        made = make_report(read_sources([str(CELLS)], [SUITE]))
        page = Path(folder) / "report.html"
        page.write_text(made.in_html([]), encoding="utf-8")
        image = Image.open(io.BytesIO(picture(page, browser))).convert("RGB")
    image.save(options.output, optimize=True)
    print(f"{options.output}: {image.width} x {image.height}, {options.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
