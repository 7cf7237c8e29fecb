"""Pages as a real browser shows them: ``pip install PySide6-Addons[webengine]`` has Chromium."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
THERE = importlib.util.find_spec("PySide6") and importlib.util.find_spec("PySide6.QtWebEngineWidgets")
needs_browser = pytest.mark.skipif(not THERE, reason="no browser: pip install 'PySide6-Addons[webengine]' has one")


def shown(url, size, script, picture=None):
    """What a script finds on a page, with all ``requests`` and messages on the ``console``, as level and text.

    Args:
        url: address of the page.
        size: width and height of the window.
        script: a JavaScript expression, which is evaluated until it is a text, that of a JSON object.
        picture: file that a picture of the page is written to.
    """
    args = [sys.executable, FOLDER / "browser.py", url, "{}x{}".format(*size), script, *([picture] if picture else [])]
    ended = subprocess.run(args, capture_output=True, text=True, check=False, timeout=1800)
    lines = ended.stdout.splitlines()
    if "loaded" not in lines:
        pytest.skip(f"the browser does not start here: {ended.stderr.splitlines()[-1:]}")
    found = [line for line in lines if line.startswith("{")]
    assert found, f"the script has found nothing in time: {ended.stderr}"
    return json.loads(found[-1])


def text_of(url, width, theme):
    """How the text of a page looks in a theme, as ``text.js`` finds it."""
    return shown(url, (width, 1600), (FOLDER / "text.js").read_text().replace("THEME", theme))


def requests_but(found, *beginnings):
    """The addresses that a page has asked for, but for those that begin so, and but for data within the page."""
    return [one for one in found["requests"] if not one.startswith((*beginnings, "data:", "blob:"))]


def of_level(found, level):
    """The messages on the console of a level: info, warning or error."""
    return [text for one, text in found["console"] if one == level]
