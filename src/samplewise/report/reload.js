// Reloads the page while a run is training, and restores scroll position, chosen score and pinned sample.

const key = `samplewise ${location.pathname}`;
const saved = (() => { try { return JSON.parse(sessionStorage.getItem(key)); } catch { return null; } })();
if (saved) {
  document.documentElement.dataset.view = saved.view;
  history.scrollRestoration = "manual";
  addEventListener("load", () => scrollTo(0, saved.scroll));
}
const saveAndReload = () => {
  const view = {scroll: scrollY, view: document.documentElement.dataset.view || "{}"};
  try { sessionStorage.setItem(key, JSON.stringify(view)); } catch { /* some browsers have no storage for local files */ }
  location.reload();
};
setTimeout(saveAndReload, 1000 * Number(document.documentElement.dataset.reload));
