"""Opens a page in Chromium, as Qt has it, and prints what it found as JSON: browser.py PAGE WIDTH THEME [PICTURE].

In a process of its own, which a browser that fails may end.
"""

import json
import os
import sys

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu")

from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineCore import QWebEnginePage, QWebEngineUrlRequestInterceptor
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

# the smallest contrast of any text with what is behind it, as the browser computes both
LOOK = """(() => {
  document.documentElement.dataset.theme = "THEME";
  const parse = text => { const found = text.match(/[\\d.]+/g); return found ? found.map(Number) : [0, 0, 0, 0]; };
  const opaque = colour => colour.length < 4 || colour[3] > 0;
  const light = colour => [0.2126, 0.7152, 0.0722].map((weight, at) => { const share = colour[at] / 255;
    return weight * (share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4); }).reduce((a, b) => a + b);
  const behind = element => { for (let one = element; one; one = one.parentElement) {
    const colour = parse(getComputedStyle(one).backgroundColor); if (opaque(colour)) return colour; }
    return [255, 255, 255]; };
  document.querySelectorAll("details").forEach(one => one.open = true);
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let smallest = 99, where = "", texts = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const style = getComputedStyle(element), inside = element.namespaceURI.endsWith("svg");
    const levels = [light(parse(inside ? style.fill : style.color)), light(behind(element))].sort((a, b) => a - b);
    const contrast = (levels[1] + 0.05) / (levels[0] + 0.05);
    texts += 1;
    if (contrast < smallest) { smallest = contrast; where = walker.currentNode.data.trim().slice(0, 40); }
  }
  const drawings = [...document.querySelectorAll(".panels svg")].map(one => one.getBoundingClientRect());
  return JSON.stringify({contrast: smallest, where, texts, page: document.documentElement.scrollWidth,
    screen: innerWidth, drawings: drawings.length,
    empty: drawings.filter(one => one.width < 200 || one.height < 50).length,
    background: getComputedStyle(document.body).backgroundColor});
})()"""


class Page(QWebEnginePage):
    """A page that keeps what it says on the console."""

    said = ()

    def javaScriptConsoleMessage(self, level, message, line, source):
        self.said = (*self.said, message)


class Requests(QWebEngineUrlRequestInterceptor):
    """Keeps the addresses of all that is fetched."""

    asked = ()

    def interceptRequest(self, info):
        self.asked = (*self.asked, info.requestUrl().toString()[:200])


def main(path, width, theme, picture=None):
    app = QApplication([])
    view, requests = QWebEngineView(), Requests()
    page = Page(view)
    page.setUrlRequestInterceptor(requests)
    view.setPage(page)
    view.resize(int(width), 1600)
    view.show()

    def ended(found):
        print(json.dumps({**json.loads(found), "console": page.said, "requests": requests.asked}))
        QTimer.singleShot(3000 if picture else 0, leave)

    def leave():
        if picture:
            view.grab().save(picture)
        app.quit()

    page.loadFinished.connect(lambda _: page.runJavaScript(LOOK.replace("THEME", theme), 0, ended))
    view.load(QUrl.fromLocalFile(os.path.abspath(path)))
    QTimer.singleShot(120_000, app.quit)
    app.exec()


if __name__ == "__main__":
    main(*sys.argv[1:])
