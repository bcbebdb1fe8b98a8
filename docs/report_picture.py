"""Create docs/report.png: screenshot of the suspects section of the demo's report.

python docs/report_picture.py        # needs Debian's chromium and chromium-driver
"""

import os
import shutil
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from selenium import webdriver

from samplewise.cli.demo import run_demo

TARGET = Path(__file__).with_name("report.png")
SIZE = (1280, 1390)
# The suspects section from its heading on, with the first suspicious sample selected.
SHOW_SAMPLES = (
    "document.querySelector('.card').click(); document.querySelector('nav').remove();"
    "document.documentElement.style.scrollPaddingTop = '1.5rem';"
    "document.querySelector('#suspects h2').scrollIntoView()"
)


def screenshot(page: Path, size: tuple[int, int], script: str) -> bytes:
    """Screenshot of a page of this size after a script has run in it."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("headless=new", "no-sandbox", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        screen = dict(zip(("width", "height"), size, strict=True), deviceScaleFactor=1, mobile=False)
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        driver.get(page.as_uri())
        driver.execute_script(script)
        return driver.get_screenshot_as_png()
    finally:
        driver.quit()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        run_demo()
        picture = Image.open(BytesIO(screenshot(Path("runs/demo/report.html").resolve(), SIZE, SHOW_SAMPLES)))
        os.chdir(TARGET.parent)
    picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(TARGET, optimize=True)
    print(f"{TARGET}: {TARGET.stat().st_size / 1024:.0f} kB")
