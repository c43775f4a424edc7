import js from "@eslint/js";

const unused = { args: "all", argsIgnorePattern: "^_", caughtErrors: "all" };

export default [
  {
    files: ["torchprof/reports/page/*.js"],
    languageOptions: { sourceType: "script", ecmaVersion: 2023 },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      ...js.configs.recommended.rules,
      "eqeqeq": "error",
      "no-var": "error",
      "prefer-const": "error",
      "no-undef": "off", // tsc does this, and knows the names of the other files and of the browser
      "no-unused-vars": ["error", { ...unused, vars: "local" }], // other files may use them: see below
      "no-multi-str": "error",
      "no-restricted-syntax": ["error", {
        selector: "TemplateElement[value.raw=/\\n/]",
        message: "A line of text that starts like a comment would be left out of the page (page_script in html.py).",
      }],
    },
  },
  {
    // All files together, as the page has them: here each name has to be used somewhere.
    files: ["build/page.js"],
    languageOptions: { sourceType: "script", ecmaVersion: 2023 },
    rules: { "no-unused-vars": ["error", { ...unused, vars: "all" }] },
  },
];
