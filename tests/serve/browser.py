"""A headless Chromium, and the chat page as its reader meets it.

`start_chromium` owns the choice of browser and flags. Waiting is always for something that can be seen, never
for time to pass.
Called by: conftest.py, which starts one browser for all page tests, and those tests.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

PATIENCE_S = 30
POLL_S = 0.02
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def why_no_browser() -> str | None:
    """Say what is missing for the page's tests, or None if all is there."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(missing)} on this machine: the chat page is not tested" if missing else None


def start_chromium(profile: Path) -> Chrome:
    """Start a browser with an empty profile that logs what it fetches and what it complains of."""
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return Chrome(options, Service(shutil.which("chromedriver")))


class ChatPage:
    """The page in the browser: what a person can do on it and what they can see."""

    def __init__(self, driver: Chrome, url: str) -> None:
        self.driver = driver
        self.url = url
        self.open()

    def open(self) -> None:
        """Load the page, also anew, and wait until it knows the models or says why not."""
        self.driver.get(self.url)
        self.until(lambda: self.script("return document.getElementById('model').options.length > 0"))

    def script(self, source: str, *arguments: object) -> Any:
        return self.driver.execute_script(source, *arguments)

    def until(self, holds: Callable[[], object]) -> None:
        WebDriverWait(self.driver, PATIENCE_S, POLL_S).until(lambda _: holds())

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        """Click as soon as it can be clicked."""
        self.until(lambda: self.find(selector).is_enabled() and self.find(selector).is_displayed())
        self.find(selector).click()

    def type(self, *keys: str) -> None:
        """Send keys to whatever has the focus, as a keyboard does."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def say(self, text: str) -> None:
        self.find("#prompt").send_keys(text, Keys.ENTER)

    def ask(self, text: str) -> None:
        """Say something and wait until the answer has come to its end, whatever that is."""
        self.say(text)
        self.until_idle()

    def until_idle(self) -> None:
        self.until(lambda: not self.is_answering)

    def texts(self, selector: str) -> list[str]:
        """The visible text of every match."""
        found: list[str] = self.script(
            "const seen = [...document.querySelectorAll(arguments[0])].filter((n) => n.checkVisibility());"
            "return seen.map((n) => n.innerText)",
            selector,
        )
        return found

    @property
    def is_answering(self) -> bool:
        return self.find("#action").get_attribute("aria-label") == "Stop"

    @property
    def questions(self) -> list[str]:
        return self.texts(".question")

    @property
    def answers(self) -> list[str]:
        return self.texts(".answer .prose")

    @property
    def figures(self) -> str:
        """What is said under the last answer."""
        return " · ".join(self.texts(".answer:last-child .facts li"))

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, feature: str, value: str) -> None:
        """Set what the reader's system prefers: a media feature."""
        features = {"features": [{"name": feature, "value": value}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", features)

    def fetched(self) -> list[str]:
        """Every address the browser asked for since this was last called."""
        messages = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def complaints(self) -> list[str]:
        """What the console said since this was last called: broken policies, errors of the script."""
        return [entry["message"] for entry in self._log("browser")]

    def _log(self, name: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.driver.get_log(name)  # type: ignore[no-untyped-call]  # selenium's own
        return entries
