// Scatter plot of loss and gradient norm, data map, gallery of the suspects, and details of the pinned sample.

const CARDS = 12;  // added to the gallery at a time: two rows on a laptop, four on a phone
const data = JSON.parse(find("samples-data").textContent);
const value = (column, k) => "same" in column ? column.same : column.values[k];
const recorded = key => data.columns.some(column => column.key === key);
const at = (key, k) => value(data.columns.find(column => column.key === key) || {same: null}, k);
const nameOf = key => data.columns.find(column => column.key === key).name;
const rank = (k, score) => data.scores[score].order.indexOf(k) + 1;
const order = () => data.scores[chosen].order;
const title = k => `Sample ${data.ids[k]}`;
// Id and name, such as a file name, which may be the id.
const caption = k => [...new Set([data.ids[k], (data.previews[k] || {}).name])].filter(part => part !== undefined).join(" ");
const columnsOf = k => data.columns.map(column => [column.name, value(column, k)]);

const preview = k => {
  const found = data.previews[k];
  if (!found) return null;
  if (found.image) return node("img", {src: found.image, alt: title(k)});
  return found.text === undefined ? facts(found.values) : node("blockquote", {textContent: found.text});
};

const restored = JSON.parse(document.documentElement.dataset.view || "{}");  // state before the page was reloaded
let chosen = data.scores[restored.score] ? restored.score : 0, cards = CARDS;
let pinned = data.ids.includes(restored.pinned) ? data.ids.indexOf(restored.pinned) : null;
const remember = () => {
  const view = {score: chosen, pinned: pinned === null ? null : data.ids[pinned]};
  document.documentElement.dataset.view = JSON.stringify(view);
};

// ------------------------------------------------------------------------------------------------- gallery

const line = (words, key, k, className) =>
  at(key, k) === null ? null : node("span", {className}, ...breakable(`${words} ${written(at(key, k))}`));

const card = (k, place) => {
  const keys = new Set([...data.scores[chosen].by, "loss", "norm"].filter(recorded));  // the score of the ranking first
  const label = at("label", k), prediction = at("prediction", k);
  const wrong = typeof label === typeof prediction && label !== prediction;  // a name and a number cannot be compared
  const button = node("button", {type: "button", className: "card", onclick: () => pin(k, true)},
    node("span", {className: "place", textContent: place}), preview(k), node("strong", {}, ...breakable(caption(k))),
    line("label", "label", k, "label"), line("predicted", "prediction", k, wrong ? "label wrong" : "label"),
    facts([...keys].map(key => [nameOf(key).replace("gradient ", ""), at(key, k)])));
  button.dataset.sample = k;
  return node("li", {}, button);
};

const fill = () => {
  const hidden = order().length - cards;
  find("gallery").replaceChildren(...order().slice(0, cards).map((k, place) => card(k, place + 1)));
  find("more").hidden = hidden <= 0;
  find("more").textContent = `Show more (${hidden} left)`;
  mark();
};

const mark = () => {
  const press = (button, is) => button.setAttribute("aria-pressed", String(is));
  for (const button of find("scores").children) press(button, Number(button.dataset.score) === chosen);
  for (const button of find("gallery").querySelectorAll(".card"))
    press(button, Number(button.dataset.sample) === pinned);
};

const choose = score => {
  [chosen, cards] = [score, CARDS];
  fill();
  render();
  remember();
};

const toGallery = k => {
  cards = Math.max(cards, rank(k, chosen));
  fill();
  const button = find("gallery").querySelector(`[data-sample="${k}"]`);
  button.scrollIntoView({block: "center"});
  button.focus({preventScroll: true});
};

// ------------------------------------------------------------------------------------------------- pinned sample

const pin = (k, scroll = false) => {
  pinned = k;
  mark();
  render();
  remember();
  if (scroll && find("pinned")) find("pinned").scrollIntoView({block: "nearest"});
};

const button = (id, words, onclick) => node("button", {type: "button", id, textContent: words, onclick});

const details = (k, actions) => {
  const short = score => score.title.replace(" (recommended)", "");
  const places = data.scores.map((score, s) => [short(score), rank(k, s)]).filter(([, place]) => place);
  const ranks = places.map(([name, place]) => `${name} (rank ${place})`).join(", ");
  return [
    node("h3", {textContent: title(k)}), preview(k), facts(columnsOf(k)),
    ranks ? node("p", {className: "quiet", textContent: `Suspect by ${ranks}.`}) : null,
    !actions ? null : node("p", {className: "actions"},
      rank(k, chosen) ? button("to-gallery", "Show in gallery", () => toGallery(k)) : null,
      button("let-go", "Unpin", () => pin(null))),
  ].filter(part => part !== null);
};

const hint = find("pinned") ? [...find("pinned").childNodes] : [];
const render = () => {
  if (find("pinned")) find("pinned").replaceChildren(...(pinned === null ? hint : details(pinned, true)));
  if (map) find("map-pinned").replaceChildren(...(pinned === null ? [] : details(pinned, false)));
  for (const drawn of [plot, map]) if (drawn) drawn.paint();
};

// ------------------------------------------------------------------------------------------------- search and filter

let matches = null;  // indices of the samples that search and filter find; null without them

const search = () => {
  const word = find("search").value.trim(), label = find("label").value, whole = data.ids.includes(word);
  const named = id => whole ? id === word : id.includes(word);
  const indices = [...data.ids.keys()].filter(k => named(data.ids[k]) && (!label || String(at("label", k)) === label));
  matches = word || label ? indices : null;
  find("matches").textContent = matches && `${written(matches.length)} of ${written(data.ids.length)} samples`;
  map.paint();
};

const fillFilter = () => {
  const labels = recorded("label") ? [...new Set(data.ids.map((_, k) => at("label", k)))].filter(x => x !== null) : [];
  const inOrder = (a, b) => String(a).localeCompare(String(b), "en", {numeric: true});
  find("label").append(...labels.sort(inOrder).map(label => node("option", {textContent: label})));
  for (const id of ["search", "label"]) find(id).addEventListener("input", search);
  find("search").addEventListener("keydown", event => { if (event.key === "Enter" && matches?.length) pin(matches[0]); });
};

// ------------------------------------------------------------------------------------------------- start

const draw = (id, tip, {axes, grid}, keys, suspects) => axes && new Plot(find(id), find(tip), axes, grid, {
  count: data.ids.length, of: k => keys.map(key => at(key, k)), suspects, pinned: () => pinned,
  title, facts: k => columnsOf(k).slice(0, 8), pin: k => pin(k),
});
const plot = draw("plot", "tip", data, ["loss", "norm"], order);
const map = draw("map", "map-tip", data.map, ["variability", "confidence"], () => matches || order());
if (map) fillFilter();
find("scores").addEventListener("click", event => {
  const pressed = event.target.closest("[data-score]");
  if (pressed) choose(Number(pressed.dataset.score));
});
find("more").addEventListener("click", () => { cards += CARDS; fill(); });
choose(chosen);
