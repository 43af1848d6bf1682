"""The explorer alone, as a page for a projector: Voila, started by `labkit lab --app`."""

import webbrowser
from pathlib import Path
from threading import Thread

from voila.app import Voila

# Voila's template asks a CDN for icons that Voila carries itself: the page may load from its own server only.
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'self'"


class App(Voila):
    """Voila, but the browser that it opens is given the token."""

    def launch_browser(self):
        """Open the page through a file that only its owner can read, so that no list of processes shows the token."""
        page = Path(self.connection_dir, "open.html")
        page.touch(0o600)
        page.write_text(f'<meta http-equiv="refresh" content="0; url={self.display_url}">', "utf-8")
        Thread(target=webbrowser.open, args=[page.as_uri()], daemon=True).start()  # a browser in this terminal would block


if __name__ == "__main__":
    App.launch_instance(tornado_settings={"headers": {"Content-Security-Policy": POLICY}})
