"""The page in a real browser, wherever one is installed."""

import pytest
from helpers.pages import needs_browser, shown, text_of
from helpers.reports import report_of, write_run

pytestmark = [needs_browser, pytest.mark.thorough]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of two methods with three seeds each, and of a run that was stopped, so that there is a warning."""
    root = tmp_path_factory.mktemp("runs")
    for method in ("FedAvg", "FedUV"):
        for seed in range(3):
            folder = root / f"{method}{seed}" / "version_0"
            write_run(folder, method, seed, rounds=12, measured=method == "FedUV" and not seed)
    write_run(root / "MOON" / "version_0", "MOON", rounds=12, done=2, measured=False)
    report_of(root, root)
    return root / "page.html"


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


# what a reader does with the table of the runs and with the first figure of two curves, and what is then seen
DONE = """(() => {
  const table = [...document.querySelectorAll(".scroll > table")].find(one => one.tBodies[0].rows.length >= 6);
  const rows = () => [...table.tBodies[0].rows].filter(row => row.checkVisibility()).map(row => row.textContent);
  const heads = [...table.tHead.rows[0].cells], column = heads.findIndex(head => head.textContent === "last");
  const last = () => [...table.tBodies[0].rows].map(row => parseFloat(row.cells[column].textContent));
  const sort = heads[column].querySelector("button"), before = last(), sorted = [];
  document.querySelectorAll("details").forEach(one => one.open = true);
  for (const turn of [0, 1, 2]) { sort.click(); sorted.push([heads[column].getAttribute("aria-sort"), last()]); }
  const field = table.parentElement.previousElementSibling.querySelector("input"), all = rows().length;
  field.value = "feduv"; field.dispatchEvent(new Event("input"));
  const filtered = rows();
  const figure = [...document.querySelectorAll("figure")].find(one => one.querySelectorAll(".legend > li").length > 1);
  const drawing = figure.querySelector("svg[data-axes]"), toggle = figure.querySelector(".legend button");
  const tip = () => { const place = drawing.getBoundingClientRect();
    drawing.dispatchEvent(new PointerEvent("pointermove", {clientX: place.left + place.width / 2}));
    return figure.querySelector(".tip:not([hidden])").textContent; };
  const name = toggle.textContent, both = tip();
  toggle.click();
  const hidden = figure.querySelectorAll("g[data-curve][style*=none]").length;
  return JSON.stringify({before, sorted, all, filtered, name, both, one: tip(), hidden,
    pressed: toggle.getAttribute("aria-pressed")});
})()"""


def test_tables_sort_and_filter_and_curves_are_toggled_and_tell_their_values(page):
    found = shown(page.as_uri(), (1280, 1600), DONE)
    assert [state for state, _ in found["sorted"]] == ["ascending", "descending", None]
    (_, upwards), (_, downwards), (_, as_it_was) = found["sorted"]
    assert upwards == sorted(found["before"]) == downwards[::-1] and as_it_was == found["before"]
    assert found["all"] == 7 and len(found["filtered"]) == 3 and all("FedUV" in one for one in found["filtered"])
    assert found["both"].startswith("round ") and found["name"] in found["both"]
    assert found["name"] not in found["one"] and found["hidden"] >= 3 and found["pressed"] == "false"
    assert found["console"] == []
