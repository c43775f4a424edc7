// The choices of the reader in the address of the page, as #measure=cpu&zoom=Net.block: a reload, Back and a copied link
// restore them, and a reload the place to which it was scrolled.

/** @typedef {Record<string, string>} Choices By name, without those that are as at first. */

class Address {
  // `read` is called when the address changes: by Back, or by hand.
  /** @param {(choices: Choices) => void} read */
  constructor(read) {
    this.written = location.hash;
    let waiting = 0;
    window.addEventListener("scroll", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => this.#write("replaceState", location.href, { y: window.scrollY }), 200);
    });
    window.addEventListener("popstate", () => {
      if (location.hash === this.written) return;
      this.written = location.hash;
      read(this.choices);
    });
  }

  /** @returns {Choices} */
  get choices() {
    return Object.fromEntries(new URLSearchParams(this.written.slice(1)));
  }

  // `isStep`: Back leads to the choices before these; else these replace them.
  /** @param {Choices} choices @param {boolean} isStep */
  write(choices, isStep) {
    const text = new URLSearchParams(choices).toString();
    const hash = text && `#${text}`;
    if (hash === this.written) return;
    if (this.#write(isStep ? "pushState" : "replaceState", hash || location.href.split("#")[0], null)) this.written = hash;
  }

  // Scrolls to where the page was before a reload: the browser did so before there was anything to scroll.
  scroll() {
    window.scrollTo(0, Number(history.state?.y ?? 0));
  }

  /** @param {"pushState" | "replaceState"} how @param {string} address @param {{ y: number } | null} state */
  #write(how, address, state) {
    try {
      history[how](state, "", address);
      return true;
    } catch {
      return false; // a page in a frame of a notebook has no address of its own
    }
  }
}
