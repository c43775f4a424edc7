"""The HTML report in a browser: how tests read and click it."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from typing import TYPE_CHECKING, Any
from zlib import decompress

if TYPE_CHECKING:
    from playwright.sync_api import Page

READ_TABLE = """async () => {
  const box = document.querySelector(".treetable");
  const found = new Map();
  box.scrollTop = 0;
  for (let round = 0; round < 5000; round++) {
    await new Promise(requestAnimationFrame);
    for (const line of box.querySelectorAll(".lines .line")) {
      found.set(parseFloat(line.style.top), {
        node: Number(line.dataset.node), path: line.querySelector(".name").title,
        name: line.querySelector(".name > span:nth-child(2)").textContent,
        level: Number(line.getAttribute("aria-level")), expanded: line.getAttribute("aria-expanded"),
        cells: [...line.querySelectorAll(".number:not(.derived)")]
          .sort((one, other) => one.dataset.at - other.dataset.at).map((cell) => cell.textContent),
      });
    }
    if (box.scrollTop + box.clientHeight >= box.scrollHeight - 1) break;
    box.scrollTop += Math.max(box.clientHeight - 60, 30);
  }
  box.scrollTop = 0;
  return [...found.entries()].sort(([one], [other]) => one - other).map(([, line]) => line);
}"""


def data_in(report: str) -> dict[str, Any]:
    """The data in a page."""
    found = re.search(r'<script type="text/plain" id="data">(.*?)</script>', report)
    assert found is not None
    text, _, columns = decompress(b64decode(found[1])).partition(b"\n")

    def restored(value: dict[str, Any]) -> Any:
        if "column" not in value:
            return value
        first, count = value["column"]
        parts = [columns[first + byte * count : first + (byte + 1) * count] for byte in range(8)]
        return [int.from_bytes(bytes(one), "little", signed=True) for one in zip(*parts)]

    data: dict[str, Any] = json.loads(text, object_hook=restored)
    return data


def button(page: Page, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def choice(page: Page, name: str) -> Any:
    """A button of the switches of measures and phases."""
    return page.locator(".choice").get_by_role("button", name=name, exact=True)
