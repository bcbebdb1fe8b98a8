// While a run goes on: the page looks at itself again, and is then as it was left: scrolled there, with that sample.

const key = `samplewise ${location.pathname}`;
const kept = (() => { try { return JSON.parse(sessionStorage.getItem(key)); } catch { return null; } })();
if (kept) {
  document.documentElement.dataset.view = kept.view;
  history.scrollRestoration = "manual";
  addEventListener("load", () => scrollTo(0, kept.scroll));
}
const again = () => {
  const view = {scroll: scrollY, view: document.documentElement.dataset.view || "{}"};
  try { sessionStorage.setItem(key, JSON.stringify(view)); } catch { /* some browsers keep nothing for files */ }
  location.reload();
};
setTimeout(again, 1000 * Number(document.documentElement.dataset.reload));
