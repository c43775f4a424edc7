"""The HTML report in a browser: how tests read and click it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

READ_DATA = """async () => {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (one) => one.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}"""
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
        cells: [...line.querySelectorAll(".number")].map((cell) => cell.textContent),
      });
    }
    if (box.scrollTop + box.clientHeight >= box.scrollHeight - 1) break;
    box.scrollTop += Math.max(box.clientHeight - 60, 30);
  }
  box.scrollTop = 0;
  return [...found.entries()].sort(([one], [other]) => one - other).map(([, line]) => line);
}"""


def button(page: Page, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def choice(page: Page, name: str) -> Any:
    """A button of the switches of measures and phases."""
    return page.locator(".choice").get_by_role("button", name=name, exact=True)
