"""The page in a real browser, wherever one is installed."""

import pytest
from helpers.pages import needs_browser, text_of
from helpers.reports import write_run

from fl_lightning.report.page import Asked, make_report
from fl_lightning.report.sources import read_sources

pytestmark = needs_browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of two methods; one of the runs goes on, so that there is a warning."""
    root = tmp_path_factory.mktemp("runs")
    for method in ("FedAvg", "FedUV"):
        write_run(root / method / "version_0", method, rounds=12, measured=method == "FedUV")
    write_run(root / "MOON" / "version_0", "MOON", rounds=12, done=2, measured=False)
    path = root / "page.html"
    path.write_text(make_report(read_sources([str(root)], []), Asked()).files("page")["page.html"])
    return path


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_readable_and_alone(page, width, theme):
    found = text_of(page.as_uri(), width, theme)
    assert found["console"] == []
    assert [one for one in found["requests"] if not one.startswith("data:")] == [page.as_uri()]
    assert found["page"] <= found["screen"]  # nothing has to be scrolled sideways but tables
    assert found["drawings"] > 10 and found["empty"] == 0
    assert found["texts"] > 200 and found["contrast"] >= 4.5, found["where"]
    assert found["background"] == {"light": "rgb(246, 247, 249)", "dark": "rgb(17, 21, 27)"}[theme]
