// Scatter plot of points, or of counts on a grid, with a tooltip for the point or cell near the pointer.

class Scale {  // maps values of an axis to 0..1
  constructor(axis) { Object.assign(this, axis); }

  place(value) {
    const share = this.log
      ? Math.log(Math.max(value, this.low) / this.low) / Math.log(this.high / this.low)
      : (value - this.low) / (this.high - this.low);
    return Math.min(1, Math.max(0, share));
  }

  value(place) {
    return this.log ? this.low * (this.high / this.low) ** place : this.low + place * (this.high - this.low);
  }

  ticks(most) {
    const found = this.log ? this.powers(most) : this.multiples(most);
    return found.filter(tick => tick >= this.low && tick <= this.high);
  }

  powers(most) {
    const first = Math.floor(Math.log10(this.low)), last = Math.floor(Math.log10(this.high));
    const every = Math.max(1, Math.ceil((last - first) / most)), digits = last - first < 3 ? [1, 2, 5] : [1];
    const all = Array.from({length: last - first + 1}, (_, k) => first + k).filter(power => power % every === 0);
    return all.flatMap(power => digits.map(digit => digit * 10 ** power));
  }

  multiples(most) {
    const rough = (this.high - this.low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find(digit => digit * power >= rough), first = Math.ceil(this.low / step);
    return Array.from({length: Math.floor(this.high / step) - first + 1}, (_, k) => (first + k) * step);
  }

  static named(tick) {
    const size = Math.abs(tick);
    if (size && (size < 1e-3 || size >= 1e5)) return tick.toExponential(Number.isInteger(Math.log10(size)) ? 0 : 1);
    return String(Number(tick.toPrecision(6)));
  }
}

class Plot {
  // `source`: count; of(k) -> [x, y] or nulls; suspects() -> indices, the most suspicious first; pinned(); title(k);
  // facts(k); pin(k or null)
  constructor(canvas, tip, axes, grid, source) {
    Object.assign(this, {canvas, tip, grid, source, hovered: null, positions: [], color: {}, width: 0, height: 0});
    [this.x, this.y] = axes.map(axis => new Scale(axis));
    this.edge = {left: 58, right: 12, top: 10, bottom: 42};
    this.resting = document.createElement("canvas");  // everything but the rings: it is not redrawn on pointer moves
    this.listen();
  }

  across(place) { return this.edge.left + place * (this.width - this.edge.left - this.edge.right); }
  down(place) { return this.height - this.edge.bottom - place * (this.height - this.edge.top - this.edge.bottom); }

  // ------------------------------------------------------------------------------------------------- drawing

  paint() {
    [this.width, this.height] = [this.canvas.clientWidth, this.canvas.clientHeight];
    if (!this.width || !this.height) return;
    const style = getComputedStyle(document.documentElement), sharp = devicePixelRatio || 1;
    for (const name of ["ink", "quiet", "rule", "card", "sample", "suspect"])
      this.color[name] = style.getPropertyValue(`--${name}`);
    for (const sheet of [this.canvas, this.resting])
      [sheet.width, sheet.height] = [Math.round(this.width * sharp), Math.round(this.height * sharp)];
    this.positions = Array.from({length: this.source.count}, (_, k) => {
      const [x, y] = this.source.of(k);
      return x === null || y === null ? null : [this.across(this.x.place(x)), this.down(this.y.place(y))];
    });
    const pen = this.resting.getContext("2d");
    pen.scale(this.resting.width / this.width, this.resting.height / this.height);
    this.axes(pen);
    this.grid ? this.cells(pen) : this.points(pen);
    this.suspects(pen);
    this.rings();
  }

  axes(pen) {
    const line = (...ends) => {
      pen.beginPath();
      pen.moveTo(...ends.slice(0, 2));
      pen.lineTo(...ends.slice(2));
      pen.stroke();
    };
    Object.assign(pen, {font: "12px system-ui, sans-serif", lineWidth: 1, textBaseline: "middle", textAlign: "center",
      strokeStyle: this.color.rule, fillStyle: this.color.quiet});
    for (const tick of this.x.ticks(this.width / 80)) {
      const at = Math.round(this.across(this.x.place(tick))) + .5;
      line(at, this.down(0), at, this.down(1));
      pen.fillText(Scale.named(tick), at, this.height - this.edge.bottom + 14);
    }
    pen.fillText(this.x.name, this.across(.5), this.height - 9);
    pen.textAlign = "right";
    for (const tick of this.y.ticks(this.height / 60)) {
      const at = Math.round(this.down(this.y.place(tick))) + .5;
      line(this.across(0), at, this.across(1), at);
      pen.fillText(Scale.named(tick), this.edge.left - 8, at);
    }
    pen.save();
    pen.translate(10, this.down(.5));
    pen.rotate(-Math.PI / 2);
    pen.textAlign = "center";
    pen.fillText(this.y.name, 0, 0);
    pen.restore();
  }

  points(pen) {
    pen.fillStyle = this.color.sample;
    pen.globalAlpha = this.positions.length > 3000 ? .35 : .55;
    const side = [[3000, 3], [300, 4]].find(([many]) => this.positions.length > many)?.[1] || 6;
    for (const at of this.positions) if (at) pen.fillRect(at[0] - side / 2, at[1] - side / 2, side, side);
    pen.globalAlpha = 1;
  }

  cells(pen) {
    const [wide, high] = this.grid.size, most = Math.log1p(Math.max(...this.grid.cells.map(cell => cell[2])));
    pen.fillStyle = this.color.sample;
    for (const [column, row, count] of this.grid.cells) {
      const left = Math.floor(this.across(column / wide)), right = Math.floor(this.across((column + 1) / wide));
      const top = Math.floor(this.down((row + 1) / high)), bottom = Math.floor(this.down(row / high));
      pen.globalAlpha = .08 + .8 * Math.log1p(count) / most;
      pen.fillRect(left, top, right - left, bottom - top);
    }
    pen.globalAlpha = 1;
  }

  suspects(pen) {
    pen.fillStyle = this.color.suspect;
    Object.assign(pen, {strokeStyle: this.color.card, lineWidth: .6});
    for (const k of this.source.suspects().slice().reverse()) {
      if (!this.positions[k]) continue;
      pen.beginPath();
      pen.arc(...this.positions[k], 4, 0, 2 * Math.PI);
      pen.fill();
      pen.stroke();
    }
  }

  rings() {
    const pen = this.canvas.getContext("2d");
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.drawImage(this.resting, 0, 0);
    pen.scale(this.canvas.width / this.width, this.canvas.height / this.height);
    Object.assign(pen, {lineWidth: 2, strokeStyle: this.color.ink});
    for (const [k, radius] of [[this.hovered, 6], [this.source.pinned(), 8]]) {
      if (k === null || !this.positions[k]) continue;
      pen.beginPath();
      pen.arc(...this.positions[k], radius, 0, 2 * Math.PI);
      pen.stroke();
    }
  }

  // ------------------------------------------------------------------------------------------------- pointing

  nearest(left, top, reach) {
    let best = null, least = reach ** 2;
    for (const k of this.grid ? this.source.suspects() : this.positions.keys()) {  // visible points only
      const at = this.positions[k], distance = at ? (at[0] - left) ** 2 + (at[1] - top) ** 2 : Infinity;
      if (distance < least) [best, least] = [k, distance];
    }
    return best;
  }

  cellAt(left, top) {
    if (!this.grid) return undefined;
    const [wide, high] = this.grid.size;
    const column = Math.floor(wide * (left - this.across(0)) / (this.across(1) - this.across(0)));
    const row = Math.floor(high * (top - this.down(0)) / (this.down(1) - this.down(0)));
    return this.grid.cells.find(cell => cell[0] === column && cell[1] === row);
  }

  cell(left, top) {
    const found = this.cellAt(left, top);
    if (!found) return null;
    const [wide, high] = this.grid.size, [column, row] = found;
    const span = (scale, k, cells) =>
      `${written(scale.value(k / cells))} to ${written(scale.value((k + 1) / cells))}`;
    return [["samples", found[2]], [this.x.name, span(this.x, column, wide)], [this.y.name, span(this.y, row, high)]];
  }

  hover(k, left = -1, top = -1) {
    const cell = k === null ? this.cell(left, top) : null;
    this.hovered = k;
    this.tip.hidden = k === null && cell === null;
    const title = k === null ? [] : [node("strong", {textContent: this.source.title(k)})];
    if (!this.tip.hidden) this.showTip([...title, facts(cell || this.source.facts(k))], left, top);
    this.rings();
  }

  showTip(words, left, top) {
    this.tip.replaceChildren(...words);
    const [wide, high] = [this.tip.offsetWidth, this.tip.offsetHeight];
    const beside = left + 14 + wide > this.width ? left - wide - 14 : left + 14;
    this.tip.style.left = `${Math.max(4, beside)}px`;
    this.tip.style.top = `${Math.max(4, Math.min(top + 14, this.height - high - 4))}px`;
  }

  move(step) {
    const order = this.source.suspects(), at = order.indexOf(this.hovered);
    const k = order[Math.min(order.length - 1, Math.max(0, at < 0 ? 0 : at + step))];
    this.hover(k, ...(this.positions[k] || [this.edge.left, this.edge.top]));
  }

  click(event) {
    const near = this.nearest(event.offsetX, event.offsetY, event.pointerType === "touch" ? 24 : 12);
    const k = near ?? this.cellAt(event.offsetX, event.offsetY)?.[3] ?? null;  // a cell may have one of its samples
    this.hover(k, event.offsetX, event.offsetY);
    if (k !== null || this.source.pinned() !== null) this.source.pin(k);
  }

  key(event) {
    const steps = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity};
    if (event.key in steps) this.move(steps[event.key]);
    else if ((event.key === "Enter" || event.key === " ") && this.hovered !== null) this.source.pin(this.hovered);
    else if (event.key === "Escape") [this.hover(null), this.source.pin(null)];
    else return;
    event.preventDefault();
  }

  listen() {
    const on = (name, listener) => this.canvas.addEventListener(name, listener);
    on("pointermove", event => {
      this.hover(this.nearest(event.offsetX, event.offsetY, 12), event.offsetX, event.offsetY);
    });
    on("pointerleave", event => { if (event.pointerType === "mouse") this.hover(null); });
    on("blur", () => this.hover(null));
    on("click", event => this.click(event));
    on("keydown", event => this.key(event));
    new ResizeObserver(() => this.paint()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
  }
}
