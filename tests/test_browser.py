"""Pages of a run, a site and a study in headless Chromium, from a phone to a wide screen: nothing is clipped, nothing overlaps."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from medflare import run_local
from medflare.cli.command import main

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
SCRIPT = """<script>
const faults = [];
addEventListener("error", event => faults.push("error " + event.message));
addEventListener("load", () => {
  const width = document.documentElement.clientWidth;
  document.querySelectorAll("details").forEach(part => part.open = true);
  if (document.documentElement.scrollWidth > width) faults.push("the page is wider than the window");
  for (const part of document.querySelectorAll("h1, h2, h3, p, dd, dt, figcaption, caption, summary, svg, img, .status, .scroll")) {
    const box = part.getBoundingClientRect();
    const name = part.tagName + " " + part.textContent.slice(0, 40);
    const scrolled = part.parentElement.closest(".scroll, .zoom summary");
    if (box.width && !scrolled && (box.left < -1 || box.right > width + 1)) faults.push("outside: " + name);
    const cut = part.scrollWidth > part.clientWidth + 1 && part.clientWidth;
    if (cut && part.tagName != "svg" && !part.matches(".scroll, .hidden, .zoom summary"))
      faults.push("clipped: " + name);
  }
  document.querySelectorAll("details").forEach(part => part.open = !part.matches(".zoom"));
  for (const part of document.querySelectorAll("body *")) {
    const box = part.getBoundingClientRect();
    const card = part.closest("section, .status, .tiles > div") || document.documentElement;
    const wide = box.right > width + 1 || box.right > card.getBoundingClientRect().right + 1;
    if (box.width && wide && !part.parentElement.closest(".scroll, .zoom summary")) faults.push("outside its card: " + part.tagName);
  }
  for (const part of document.querySelectorAll(".answer")) {
    const box = part.getBoundingClientRect(), frame = part.closest(".scroll").getBoundingClientRect();
    const row = part.parentElement.firstElementChild.getBoundingClientRect();
    if (box.width && (box.right > frame.right + 1 || box.right > width || box.left < row.right - 1))
      faults.push("the answer is hidden: " + part.parentElement.textContent.slice(0, 60));
  }
  for (const text of document.querySelectorAll("svg text")) {
    const matrix = text.getScreenCTM(), scale = Math.hypot(matrix.a, matrix.b), size = parseFloat(getComputedStyle(text).fontSize) * scale;
    if (size < 8) faults.push("text of " + size.toFixed(1) + " pixels: " + text.textContent);
  }
  for (const parent of document.querySelectorAll("main, dl, section, .panels, .pictures, .grid, .columns, details")) {
    const boxes = [...parent.children].map(child => child.getBoundingClientRect()).filter(box => box.width > 1 && box.height > 1);
    boxes.forEach((a, i) => boxes.slice(i + 1).forEach(b => {
      const beside = a.right <= b.left + 1 || b.right <= a.left + 1, above = a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
      if (!beside && !above) faults.push("overlap in " + parent.tagName);
    }));
  }
  document.body.innerHTML = "<pre id=faults></pre>";
  document.getElementById("faults").textContent = JSON.stringify(faults);
});
</script>"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    run_local(
        "fedsm",
        "phantom",
        ["site-1", "site-2"],
        rounds=1,
        seed=0,
        outside=["site-3"],
        out=folder / "run",
    )
    assert 'class="num answer' in (folder / "run/report.html").read_text()
    run_local(
        "fedavg", "phantom_grades", ["site-1", "site-2"], rounds=1, seed=0, out=folder / "grades"
    )
    assert main(["study", "fedavg", "ditto", "--reference", "single-site", "--sites", "2", "--rounds", "1", "--seeds", "0,1",
                 "--out", str(folder / "study")]) == 0  # fmt: skip
    return {
        "run": folder / "run/report.html",
        "grades": folder / "grades/report.html",
        "site": folder / "run/sites/site-1/report.html",
        "site with grades": folder / "grades/sites/site-1/report.html",
        "study": folder / "study/study.html",
    }


@pytest.mark.slow
@pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed (Debian: apt install chromium)"
)
@pytest.mark.parametrize("width", [360, 768, 1440])
def test_pages_fit_and_have_no_error(pages: dict[str, Path], width: int, tmp_path: Path) -> None:
    for name, page in pages.items():
        text = page.read_text()
        assert len(text) < 5_000_000
        checked = tmp_path / "page.html"
        checked.write_text(text.replace("<head>", f"<head>{SCRIPT}"))
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=5000",
            f"--window-size={width},900",
            "--dump-dom",
        ]
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        dom = subprocess.run(
            [str(CHROMIUM), *options, profile, checked.as_uri()],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        reported = re.search(r'<pre id="faults">(.*)</pre>', dom.stdout)
        assert reported and json.loads(html.unescape(reported[1])) == [], name
