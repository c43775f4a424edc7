// The reports of the run, one at a time, as tabs: the same tables as in the terminal.

class ReportTabs {
  // Calls page.drawReports() for another tab, and page.show(node) on a click on a row of a layer.
  /** @param {Page} page @param {PageData.Reports} reports */
  constructor(page, { tabs, contents }) {
    this.page = page;
    this.tabs = tabs;
    this.contents = contents;
    this.chosen = tabs.length ? tabs[0].title : "";
    this.drawn = ""; // the index of the content, and the measure
    this.list = element("div", { class: "tabs", role: "tablist", "aria-label": "Tables" });
    this.panel = element("div", { role: "tabpanel", id: "report", tabindex: "0" });
    this.title = element("h3");
    this.box = element("section", { id: "reports", hidden: !tabs.length }, this.title, this.list, this.panel);
    this.list.addEventListener("keydown", (event) => this.#key(event));
  }

  /** @param {string} title */
  choose(title) {
    this.chosen = this.tabs.some((tab) => tab.title === title) ? title : this.tabs.at(0)?.title ?? "";
  }

  // `source`: -1 for all together, which are last. `phase`: the index in data.phases; -1 for all, which are last.
  // Operators are sorted by the measure, if it is not that of the headline: that is their order already.
  /** @param {number} source @param {number} phase @param {PageData.Measure | null} measure */
  draw(source, phase, measure) {
    keepingFocus(this.list, () => this.list.replaceChildren(...this.tabs.map(({ title }) => this.#tab(title))));
    const { sources, comparison } = this.page.run.data;
    const of = source < 0 ? "all ranks" : comparison ? `the whole run ${sources[source].name}` : sources[source].name;
    const title = sources.length > 1 ? `Tables of ${of}` : "Tables";
    this.title.textContent = this.page.run.interval ? `${title}, all of the time` : title;
    const tab = this.tabs.find(({ title }) => title === this.chosen);
    if (!tab) return;
    const index = tab.of.at(source)?.at(tab.of[0].length > 1 ? phase : 0) ?? null;
    this.panel.setAttribute("aria-label", tab.title);
    const by = measure && measure !== this.page.run.mainMeasure(source) ? [`Self ${measure.operators}`, measure.operators] : [];
    const drawn = `${index} ${by.at(0)}`;
    if (drawn === this.drawn) return; // the table keeps the order that the user chose
    this.drawn = drawn;
    const nothing = element("p", { class: "empty" }, "Nothing was recorded for this choice.");
    this.panel.replaceChildren(...(index === null ? [nothing] : reportParts(this.contents[index], (node) => this.page.show(node), by)));
  }

  /** @param {string} title */
  #tab(title) {
    const isChosen = title === this.chosen;
    const onclick = () => { this.chosen = title; this.page.drawReports(); };
    return element("button", { type: "button", role: "tab", "aria-selected": isChosen ? "true" : "false", "aria-controls": "report", tabindex: isChosen ? 0 : -1, onclick }, title);
  }

  // One stop of the Tab key; arrows choose the tab before and after, as in the ARIA practices.
  /** @param {KeyboardEvent} event */
  #key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const at = this.tabs.findIndex(({ title }) => title === this.chosen);
    this.chosen = this.tabs[(at + step + this.tabs.length) % this.tabs.length].title;
    this.page.drawReports();
    const chosen = this.list.querySelector("[aria-selected=true]");
    if (chosen instanceof HTMLElement) chosen.focus();
  }
}
