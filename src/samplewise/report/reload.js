// While a run goes on: the page looks at itself again, and is then as it was left: scrolled there, with that sample.
"use strict";
(() => {
  const root = document.documentElement, key = `samplewise ${location.pathname}`;
  const kept = (() => { try { return JSON.parse(sessionStorage.getItem(key)); } catch { return null; } })();
  if (kept) {
    root.dataset.view = kept.view;
    history.scrollRestoration = "manual";
    addEventListener("load", () => scrollTo(0, kept.scroll));
  }
  const again = () => {
    const left = {scroll: scrollY, view: root.dataset.view || "{}"};
    try { sessionStorage.setItem(key, JSON.stringify(left)); } catch { /* a browser that keeps nothing for files */ }
    location.reload();
  };
  setTimeout(again, 1000 * Number(root.dataset.reload));
})();
