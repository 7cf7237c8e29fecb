"""Opens a page in Chromium, as Qt has it, and prints what a script finds there: browser.py URL SIZE SCRIPT [PICTURE].

SIZE is that of the window, ``1280x1600``. SCRIPT is a JavaScript expression, which is evaluated until it is the text of
a JSON object; the page's messages and requests are added to it. ``helpers.pages`` starts this program, a process of its
own, which a browser that fails may end.
"""

import json
import os
import sys

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu")

from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineCore import QWebEnginePage, QWebEngineSettings, QWebEngineUrlRequestInterceptor
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

# milliseconds from one evaluation of the script to the next, and until the last
AGAIN, LIMIT = 250, 180_000


class Page(QWebEnginePage):
    """A page that keeps what it says on the console, as pairs of level and message."""

    said = ()

    def javaScriptConsoleMessage(self, level, message, line, source):
        self.said = (*self.said, (level.name.removesuffix("MessageLevel").lower(), message))


class Requests(QWebEngineUrlRequestInterceptor):
    """Keeps the addresses of all that is fetched."""

    asked = ()

    def interceptRequest(self, info):
        self.asked = (*self.asked, info.requestUrl().toString()[:200])


def main(url, size, script, picture=None):
    app = QApplication([])
    view, requests = QWebEngineView(), Requests()
    page = Page(view)
    page.setUrlRequestInterceptor(requests)
    # else what a page on disk asks another machine for is dropped before it can be seen here; the first without the
    # second drops the page's own files
    for what in ("LocalContentCanAccessRemoteUrls", "LocalContentCanAccessFileUrls"):
        page.settings().setAttribute(QWebEngineSettings.WebAttribute[what], True)
    view.setPage(page)
    view.resize(*map(int, size.split("x")))
    view.show()

    def look():
        page.runJavaScript(script, 0, answered)

    def answered(found):
        if not found:
            QTimer.singleShot(AGAIN, look)
            return
        print(json.dumps({**json.loads(found), "console": page.said, "requests": requests.asked}))
        QTimer.singleShot(3000 if picture else 0, leave)

    def leave():
        if picture:
            view.grab().save(picture)
        app.quit()

    def loaded(_):
        print("loaded", flush=True)
        look()

    page.loadFinished.connect(loaded)
    view.load(QUrl(url))
    QTimer.singleShot(LIMIT, app.quit)
    app.exec()


if __name__ == "__main__":
    main(*sys.argv[1:])
