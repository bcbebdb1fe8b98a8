// Loss against norm of each sample, and a gallery of the suspects. All that comes from the data is set as text.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("samples-data").textContent);
  const values = key => (data.columns.find(column => column.key === key) || {values: []}).values;
  const root = document.documentElement, find = id => document.getElementById(id);
  const view = Object.assign({score: 0, pinned: null}, JSON.parse(root.dataset.view || "{}"));  // outlives a reload
  const CARDS = 24;
  let cards = CARDS, pinned = null, plot = null;

  // ------------------------------------------------------------------------------------------------- words

  const node = (tag, properties, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children.filter(child => child !== null));
    return made;
  };

  const written = value => {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number") return String(value);
    if (Number.isInteger(value)) return value.toLocaleString("en");
    const size = Math.abs(value);
    return size < 1e-3 || size >= 1e6 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  };

  const order = () => data.scores[view.score].order;
  const rank = (k, score) => data.scores[score].order.indexOf(k) + 1;
  const shown = column => column.values.length > 0;
  const labelled = k => { const label = values("label")[k]; return label === undefined || label === null ? "" : written(label); };

  const preview = k => {
    const found = data.previews[k];
    if (!found) return null;
    if (found.image) return node("img", {src: found.image, alt: `sample ${data.ids[k]}`});
    if (found.text !== undefined) return node("blockquote", {textContent: found.text});
    return facts(found.values);
  };

  const facts = pairs => node("dl", {}, ...pairs.flatMap(([name, value]) =>
    [node("dt", {textContent: name}), node("dd", {textContent: written(value)})]));

  const known = k => data.columns.filter(shown).map(column => [column.name, column.values[k]]);

  // ------------------------------------------------------------------------------------------------- the gallery

  const card = (k, place) => {
    const label = labelled(k);
    const numbers = ["loss", "norm"].filter(key => values(key).length).map(key => [key, values(key)[k]]);
    const button = node("button", {type: "button", className: "card", onclick: () => pin(k, true)},
      node("span", {className: "place", textContent: place}), preview(k),
      node("strong", {textContent: data.ids[k]}),
      label ? node("span", {className: "label", textContent: `label ${label}`}) : null,
      facts(numbers));
    button.dataset.sample = k;
    button.setAttribute("aria-pressed", String(k === pinned));
    return node("li", {}, button);
  };

  const fill = () => {
    find("gallery").replaceChildren(...order().slice(0, cards).map((k, place) => card(k, place + 1)));
    const left = order().length - cards;
    find("more").hidden = left <= 0;
    find("more").textContent = `Show more (${left} left)`;
  };

  const choose = score => {
    view.score = score;
    cards = CARDS;
    for (const button of find("scores").children)
      button.setAttribute("aria-pressed", String(Number(button.dataset.score) === score));
    fill();
    if (pinned !== null) tell();
    if (plot) plot.paint();
    keep();
  };

  const toGallery = k => {
    cards = Math.max(cards, rank(k, view.score));
    fill();
    const button = find("gallery").querySelector(`[data-sample="${k}"]`);
    button.scrollIntoView({block: "center"});
    button.focus({preventScroll: true});
  };

  // ------------------------------------------------------------------------------------------------- the pinned one

  const pin = (k, scroll = false) => {
    pinned = k;
    for (const button of find("gallery").querySelectorAll(".card"))
      button.setAttribute("aria-pressed", String(Number(button.dataset.sample) === k));
    tell();
    if (plot) plot.paint();
    if (scroll && find("pinned")) find("pinned").scrollIntoView({block: "nearest"});
    keep();
  };

  const hint = find("pinned") ? [...find("pinned").childNodes] : [];
  const tell = () => {
    if (!find("pinned")) return;
    if (pinned === null) return find("pinned").replaceChildren(...hint);
    const k = pinned, places = data.scores.map((score, s) => [score.title, rank(k, s)]).filter(([, place]) => place);
    const link = rank(k, view.score) ?
      node("button", {type: "button", id: "to-gallery", textContent: "Show in the gallery", onclick: () => toGallery(k)}) : null;
    find("pinned").replaceChildren(
      node("h3", {}, node("span", {className: "quiet", textContent: "Sample "}), data.ids[k]), preview(k) || "", facts(known(k)),
      places.length ? node("p", {className: "quiet", textContent: "Suspect by " +
        places.map(([title, place]) => `${title.replace(" (recommended)", "")} (place ${place})`).join(", ") + "."}) : "",
      node("p", {className: "actions"}, link,
        node("button", {type: "button", id: "let-go", textContent: "Let go", onclick: () => pin(null)})));
  };

  const keep = () => {
    root.dataset.view = JSON.stringify({score: view.score, pinned: pinned === null ? null : data.ids[pinned]});
  };

  // ------------------------------------------------------------------------------------------------- the plot

  const drawing = (canvas, tip) => {
    const [x, y] = data.axes, xs = values("loss"), ys = values("norm"), edge = {left: 58, right: 12, top: 10, bottom: 42};
    const pen = canvas.getContext("2d"), resting = document.createElement("canvas");
    let width = 0, height = 0, places = [], hovered = null, colour = {};

    const place = (axis, value) => axis.log
      ? Math.log(Math.max(value, axis.low) / axis.low) / Math.log(axis.high / axis.low)
      : (value - axis.low) / (axis.high - axis.low);
    const value = (axis, share) => axis.log
      ? axis.low * (axis.high / axis.low) ** share : axis.low + share * (axis.high - axis.low);
    const across = share => edge.left + share * (width - edge.left - edge.right);
    const down = share => height - edge.bottom - share * (height - edge.top - edge.bottom);

    const ticks = (axis, most) => {
      const found = [];
      if (axis.log) {
        const first = Math.ceil(Math.log10(axis.low)), last = Math.floor(Math.log10(axis.high));
        const every = Math.max(1, Math.ceil((last - first + 1) / most)), between = last - first < 2 ? [1, 2, 5] : [1];
        for (let power = first - 1; power <= last; power++)
          if ((power - first) % every === 0) found.push(...between.map(digit => digit * 10 ** power));
      } else {
        const rough = (axis.high - axis.low) / most, power = 10 ** Math.floor(Math.log10(rough));
        const step = power * [1, 2, 5, 10].find(digit => digit * power >= rough);
        for (let n = Math.ceil(axis.low / step); n * step <= axis.high; n++) found.push(n * step);
      }
      return found.filter(tick => tick >= axis.low && tick <= axis.high);
    };

    const named = tick => {
      const size = Math.abs(tick);
      if (size && (size < 1e-3 || size >= 1e5)) return tick.toExponential(Number.isInteger(Math.log10(size)) ? 0 : 1);
      return String(Number(tick.toPrecision(6)));
    };

    const axes = pen => {
      pen.font = "12px system-ui, sans-serif";
      pen.lineWidth = 1;
      pen.strokeStyle = colour.rule;
      pen.fillStyle = colour.quiet;
      pen.textBaseline = "middle";
      const line = (...ends) => { pen.beginPath(); pen.moveTo(...ends.slice(0, 2)); pen.lineTo(...ends.slice(2)); pen.stroke(); };
      pen.textAlign = "center";
      for (const tick of ticks(x, width / 80)) {
        const at = Math.round(across(place(x, tick))) + .5;
        line(at, down(0), at, down(1));
        pen.fillText(named(tick), at, height - edge.bottom + 14);
      }
      pen.fillText(x.name, (across(0) + across(1)) / 2, height - 9);
      pen.textAlign = "right";
      for (const tick of ticks(y, height / 60)) {
        const at = Math.round(down(place(y, tick))) + .5;
        line(across(0), at, across(1), at);
        pen.fillText(named(tick), edge.left - 8, at);
      }
      pen.save();
      pen.translate(10, (down(0) + down(1)) / 2);
      pen.rotate(-Math.PI / 2);
      pen.textAlign = "center";
      pen.fillText(y.name, 0, 0);
      pen.restore();
    };

    const cloud = pen => {
      if (!data.grid) {
        pen.fillStyle = colour.sample;
        pen.globalAlpha = places.length > 3000 ? .35 : .55;
        for (const at of places) if (at) pen.fillRect(at[0] - 1.5, at[1] - 1.5, 3, 3);
      } else {
        const [wide, high] = data.grid.size, most = Math.log1p(Math.max(...data.grid.cells.map(cell => cell[2])));
        pen.fillStyle = colour.sample;
        for (const [column, row, count] of data.grid.cells) {
          const left = Math.floor(across(column / wide)), top = Math.floor(down((row + 1) / high));
          pen.globalAlpha = .08 + .8 * Math.log1p(count) / most;
          pen.fillRect(left, top, Math.floor(across((column + 1) / wide)) - left, Math.floor(down(row / high)) - top);
        }
      }
      pen.globalAlpha = 1;
    };

    const suspects = pen => {
      for (const k of order().slice().reverse()) {
        if (!places[k]) continue;
        pen.beginPath();
        pen.arc(...places[k], 4, 0, 2 * Math.PI);
        pen.fillStyle = colour.suspect;
        pen.fill();
        pen.strokeStyle = colour.card;
        pen.stroke();
      }
    };

    const ring = (k, wide) => {
      if (k === null || !places[k]) return;
      pen.beginPath();
      pen.arc(...places[k], wide, 0, 2 * Math.PI);
      pen.lineWidth = 2;
      pen.strokeStyle = colour.ink;
      pen.stroke();
    };

    const overlay = () => {
      pen.setTransform(1, 0, 0, 1, 0, 0);
      pen.clearRect(0, 0, canvas.width, canvas.height);
      pen.drawImage(resting, 0, 0);
      pen.scale(canvas.width / width, canvas.height / height);
      ring(hovered, 6);
      ring(pinned, 8);
    };

    const paint = () => {
      const style = getComputedStyle(root), sharp = devicePixelRatio || 1;
      for (const name of ["ink", "quiet", "rule", "card", "sample", "suspect"]) colour[name] = style.getPropertyValue(`--${name}`);
      [width, height] = [canvas.clientWidth, canvas.clientHeight];
      if (!width || !height) return;
      for (const sheet of [canvas, resting]) [sheet.width, sheet.height] = [Math.round(width * sharp), Math.round(height * sharp)];
      places = xs.map((loss, k) => loss === null || ys[k] === null ? null : [across(place(x, loss)), down(place(y, ys[k]))]);
      const base = resting.getContext("2d");
      base.scale(resting.width / width, resting.height / height);
      for (const layer of [axes, cloud, suspects]) layer(base);
      overlay();
    };

    const nearest = (left, top, reach) => {
      let best = null, least = reach ** 2;
      places.forEach((at, k) => {
        const distance = at ? (at[0] - left) ** 2 + (at[1] - top) ** 2 : Infinity;
        if (distance < least) [best, least] = [k, distance];
      });
      return best;
    };

    const counted = (left, top) => {
      if (!data.grid) return null;
      const [wide, high] = data.grid.size;
      const column = Math.floor(wide * (left - across(0)) / (across(1) - across(0)));
      const row = Math.floor(high * (top - down(0)) / (down(1) - down(0)));
      const cell = data.grid.cells.find(cell => cell[0] === column && cell[1] === row);
      const span = (axis, k, cells) => `${written(value(axis, k / cells))} to ${written(value(axis, (k + 1) / cells))}`;
      return cell && [["samples", cell[2]], [x.name, span(x, column, wide)], [y.name, span(y, row, high)]];
    };

    const say = (title, pairs, left, top) => {
      tip.replaceChildren(...(title === null ? [] : [node("strong", {textContent: title})]), facts(pairs));
      tip.hidden = false;
      const room = [width - tip.offsetWidth - 4, height - tip.offsetHeight - 4];
      tip.style.left = `${Math.max(4, left + 14 > room[0] ? left - tip.offsetWidth - 14 : left + 14)}px`;
      tip.style.top = `${Math.max(4, Math.min(top + 14, room[1]))}px`;
    };

    const hover = (k, left, top) => {
      hovered = k;
      if (k !== null) say(`Sample ${data.ids[k]}`, known(k).slice(0, 8), left, top);
      else {
        const cell = left === undefined ? null : counted(left, top);
        if (cell) say(null, cell, left, top);
        else tip.hidden = true;
      }
      overlay();
    };

    const move = step => {
      const at = order().indexOf(hovered), last = order().length - 1;
      const k = order()[Math.min(last, Math.max(0, at < 0 ? 0 : at + step))];
      hover(k, ...(places[k] || [edge.left, edge.top]));
    };

    const keys = {
      ArrowRight: () => move(1), ArrowDown: () => move(1), ArrowLeft: () => move(-1), ArrowUp: () => move(-1),
      Home: () => move(-Infinity), End: () => move(Infinity),
      Enter: () => { if (hovered !== null) pin(hovered); }, " ": () => { if (hovered !== null) pin(hovered); },
      Escape: () => { hover(null); pin(null); },
    };

    canvas.addEventListener("pointermove", event => hover(nearest(event.offsetX, event.offsetY, 12), event.offsetX, event.offsetY));
    canvas.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") hover(null); });
    canvas.addEventListener("click", event => {
      const k = nearest(event.offsetX, event.offsetY, event.pointerType === "touch" ? 24 : 12);
      hover(k, event.offsetX, event.offsetY);
      if (k !== null || pinned !== null) pin(k);
    });
    canvas.addEventListener("keydown", event => {
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    canvas.addEventListener("blur", () => hover(null));
    new ResizeObserver(paint).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
    return {paint, place: k => places[k]};
  };

  // ------------------------------------------------------------------------------------------------- all together

  find("scores").addEventListener("click", event => {
    const button = event.target.closest("[data-score]");
    if (button) choose(Number(button.dataset.score));
  });
  find("more").addEventListener("click", () => { cards += CARDS; fill(); });
  if (data.axes) plot = drawing(find("plot"), find("tip"));
  const again = view.pinned === null ? -1 : data.ids.indexOf(view.pinned);
  pinned = again < 0 ? null : again;
  choose(data.scores[view.score] ? view.score : 0);
  tell();
})();
