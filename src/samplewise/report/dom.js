// Helpers to build elements. Data is only ever set as text, never as HTML.

const find = id => document.getElementById(id);

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

// A name or path that may continue in the next line after / _ and .
const breakable = name => String(name).split(/(?<=[/_.])/).flatMap((part, k) => k ? [node("wbr", {}), part] : [part]);

const facts = pairs => node("dl", {}, ...pairs.map(([name, value]) =>
  node("div", {}, node("dt", {}, ...breakable(name)), node("dd", {textContent: written(value)}))));
