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

function seconds(value) {
  for (const [size, unit] of [[1, " s"], [1e-3, " ms"]]) {
    if (value >= size) return (value / size).toPrecision(3) + unit;
  }
  return (value * 1e6).toPrecision(3) + " µs";
}

const SECTIONS = {};
