// Light or dark: as the reader chose before, else as the system is.

/** @type {string | undefined} */
let chosenTheme;

function currentTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  try {
    return localStorage.getItem("torchprof-theme") ?? system;
  } catch {
    return chosenTheme ?? system; // a frame without an origin has no storage
  }
}

// Draws the page in the theme, also when that of the system changes.
function followTheme() {
  const follow = () => { document.documentElement.dataset.theme = currentTheme(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", follow);
  follow();
}

function switchTheme() {
  chosenTheme = currentTheme() === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("torchprof-theme", chosenTheme);
  } catch {
    // See above.
  }
  document.documentElement.dataset.theme = chosenTheme;
}
