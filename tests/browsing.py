"""Headless Chromium for the tests, and the actions they perform in it."""

import shutil
from contextlib import contextmanager

import pytest
from selenium import webdriver
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.actions.pointer_input import PointerInput
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

LAPTOP, PHONE = (1280, 800), (390, 844)
# Position of the topmost dot with the color of suspects on the canvas.
FIND_SUSPECT = """
const canvas = document.getElementById("plot"), ratio = canvas.width / canvas.clientWidth;
const copy = Object.assign(document.createElement("canvas"), {width: canvas.width, height: canvas.height});
const pen = copy.getContext("2d", {willReadFrequently: true});
pen.drawImage(canvas, 0, 0);
const {data, width} = pen.getImageData(0, 0, copy.width, copy.height);
const probe = document.createElement("i");
probe.style.color = getComputedStyle(document.documentElement).getPropertyValue("--suspect");
document.body.append(probe);
const [red, green, blue] = getComputedStyle(probe).color.match(/[0-9]+/g).map(Number);
probe.remove();
const is = k => data[k] === red && data[k + 1] === green && data[k + 2] === blue;
for (let k = 0; k < data.length; k += 4)
  if ([-2, -1, 0, 1, 2].every(step => is(k + 4 * step) && is(k + 4 * step * width)))
    return [(k / 4) % width / ratio, Math.floor(k / 4 / width) / ratio];
return null;
"""


def missing():
    """Programs that the browser tests need and that are not installed."""
    return [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]


@contextmanager
def chromium():
    if missing():
        pytest.skip(
            f"browser tests need chromium and chromedriver; found no {' and no '.join(missing())} on this machine. "
            "Install them: apt-get install chromium chromium-driver"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    # Containers have neither a sandbox for root nor much shared memory.
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    def __init__(self, driver):
        self.driver, self.run = driver, driver.execute_script

    def show(self, path, size=LAPTOP, dark=False):
        """Open a page on a device."""
        phone = size == PHONE
        width, height = size
        screen = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": phone})
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(path.as_uri())

    def complaints(self):
        """Warnings and errors of the console since the last call."""
        return [entry for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def one(self, css):
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css):
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def texts(self, css):
        """Texts of the elements, read in a single call because the page may change."""
        return self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText.trim())", css)

    def click(self, css):
        self.run("arguments[0].scrollIntoView({block: 'center'})", self.one(css))
        self.one(css).click()

    def press(self, css, *keys):
        self.one(css).send_keys(*(getattr(Keys, key) for key in keys))

    def suspect(self):
        """Position of the topmost suspect in the plot; scrolls to the plot."""
        self.run("document.getElementById('plot').scrollIntoView({block: 'center'})")
        found = self.run(FIND_SUSPECT)
        assert found, "no suspect is drawn"
        return found

    def point(self, left, top, click=False, finger=False):
        """Move the mouse, or a finger, to a position in the plot."""
        kind = "touch" if finger else "mouse"
        plot, device = self.one("#plot"), PointerInput(kind, f"the {kind}")
        actions = ActionBuilder(self.driver, mouse=device, duration=0)
        away = round(left - plot.size["width"] / 2), round(top - plot.size["height"] / 2)
        actions.pointer_action.move_to(plot, *away)  # from its middle
        if click:
            actions.pointer_action.pointer_down().pointer_up()
        actions.perform()

    def until(self, holds, seconds=120):
        return WebDriverWait(self.driver, seconds, 0.05).until(lambda _: holds())
