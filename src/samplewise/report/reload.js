// Reloads the page while a run is training, and restores scroll position, chosen score and pinned sample.

const key = `samplewise ${location.pathname}`;
const kept = (() => { try { return JSON.parse(sessionStorage.getItem(key)); } catch { return null; } })();
if (kept) {
  document.documentElement.dataset.view = kept.view;
  history.scrollRestoration = "manual";
  addEventListener("load", () => scrollTo(0, kept.scroll));
}
const again = () => {
  const view = {scroll: scrollY, view: document.documentElement.dataset.view || "{}"};
  try { sessionStorage.setItem(key, JSON.stringify(view)); } catch { /* some browsers have no storage for local files */ }
  location.reload();
};
setTimeout(again, 1000 * Number(document.documentElement.dataset.reload));
