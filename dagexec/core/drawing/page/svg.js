"use strict";
// Elements, colors and figures that all sections use. Text is set as text: names of a model are never markup.
const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// Hues a golden angle apart, so that neighbors differ however many there are.
const hueOf = (number) => Math.round((number * 137.508) % 360);

function count(value) {
  for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
    if (value >= size) return (value / size).toPrecision(3) + unit;
  }
  return String(value);
}

const PREFIXES = [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"], [1e-9, "n"]];

function seconds(value) {
  if (value === 0) return "0";
  for (const [size, unit] of [[1, " s"], [1e-3, " ms"]]) {
    if (value >= size) return (value / size).toPrecision(3) + unit;
  }
  return (value * 1e6).toPrecision(3) + " µs";
}

// Round places of an axis from `low` to `high`: multiples of 1, 2 or 5 times a power of ten, in at most `most` steps.
function ticks(low, high, most) {
  if (!(high > low)) return [low];
  const least = (high - low) / most, power = 10 ** Math.floor(Math.log10(least) + 1e-9);
  const step = [1, 2, 5, 10].find((one) => one * power >= least * (1 - 1e-9)) * power;
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, place) => Number(((first + place) * step).toPrecision(12)));
}

// Texts of the places in `values`, all with as many decimals. `unit` gets one prefix; plain numbers have unit "".
function tickLabels(values, unit) {
  const largest = Math.max(...values.map(Math.abs));
  const [size, prefix] = (unit && PREFIXES.find(([one]) => largest >= one)) || [1, ""];
  const step = values.length > 1 ? (values[1] - values[0]) / size : largest / size;
  const digits = step > 0 ? Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) : 0;
  const figure = (value) => digits > 6 ? value.toExponential(1) : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return values.map((value) => value === 0 ? "0" : `${figure(value / size)} ${prefix}${unit}`.trim());
}

// A line across and a text at each round place. `x` maps a value to a pixel between `left` and `right`.
function axisBelow(drawing, [low, high], x, { left, right, top, bottom, unit }) {
  const places = ticks(low, high, Math.max(1, Math.floor((right - left) / 80)));
  tickLabels(places, unit).forEach((text, number) => {
    const at = x(places[number]), half = text.length * 3.3;
    drawing.append(svg("line", { class: "axis", x1: at, x2: at, y1: top, y2: bottom }),
      svg("text", { class: "label tick", x: Math.min(Math.max(at, left + half), right - half), y: bottom + 13, "text-anchor": "middle" }, text));
  });
}

function axisBeside(drawing, [low, high], y, { left, right, unit, most = 5 }) {
  const places = ticks(low, high, most);
  tickLabels(places, unit).forEach((text, number) => {
    const at = y(places[number]);
    drawing.append(svg("line", { class: "axis", x1: left, x2: right, y1: at, y2: at }),
      svg("text", { class: "label tick", x: left - 6, y: at + 4, "text-anchor": "end" }, text));
  });
}

// What marks and colors mean: pairs of the attributes of a sample and its text. A sample is a small drawing.
function legend(...entries) {
  return html("ul", { class: "legend" }, ...entries.map(([attributes, text]) => html("li", {},
    svg("svg", { width: 18, height: 12, "aria-hidden": "true" }, sampleOf(attributes)), ` ${text}`)));
}

function sampleOf({ shape = "rect", hue, heat, ...attributes }) {
  const places = { rect: { x: 1, y: 1, width: 16, height: 10 }, line: { x1: 0, x2: 18, y1: 6, y2: 6 }, circle: { cx: 9, cy: 6, r: 3.5 } };
  const element = svg(shape, { ...places[shape], ...attributes });
  if (hue !== undefined) element.style.setProperty("--hue", hue);
  if (heat !== undefined) element.style.setProperty("--heat", heat);
  return element;
}

// A drawing as wide as the page, drawn again when that changes: `draw` gets the empty drawing and its width. Returns
// what draws it again.
function chart(place, height, label, draw) {
  const drawing = svg("svg", { class: "chart", role: "img", "aria-label": `${label}; the table below has the figures` });
  drawing.style.height = `${height}px`;
  place.append(drawing);
  const again = () => {
    const width = drawing.getBoundingClientRect().width || 800;
    drawing.replaceChildren();
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    draw(drawing, width);
  };
  new ResizeObserver(again).observe(drawing);
  again();
  return again;
}

const SECTIONS = {};
