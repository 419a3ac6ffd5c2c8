// The plan of the arena: operators from left to right, addresses from bottom to top, a rectangle for each buffer.
SECTIONS.memory = (place, data) => {
  const HEIGHT = 320, LEFT = 74;
  const { buffers, operators } = data;
  const top = Math.max(1, ...buffers.map((one) => one.offset + one.bytes));
  const drawing = svg("svg", { class: "chart", role: "group", "aria-label": "Buffers over the operators that use them; the table below has the figures" });
  drawing.style.height = `${HEIGHT}px`;
  const panel = html("div", { class: "panel" }, "Point at a buffer.");
  const percent = data.unshared ? ` (${Math.round(data.peak / data.unshared * 100)}%)` : "";
  place.append(html("p", {}, `The arena has ${count(data.peak)}B${percent} of the ${count(data.unshared)}B that all buffers together are; ` +
    (data.lower_bound ? `no plan needs less than ${count(data.lower_bound)}B.` : "the least that any plan needs was not computed.")), drawing, panel);
  function draw() {
    const width = drawing.getBoundingClientRect().width || 800;
    const x = (operator) => LEFT + operator / operators.length * (width - LEFT - 4);
    const y = (offset) => HEIGHT - 22 - offset / top * (HEIGHT - 30);
    drawing.replaceChildren();
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    buffers.forEach((one, number) => {
      const element = svg("rect", { class: one.name === "working memory" ? "buffer working" : "buffer", x: x(one.first), y: y(one.offset + one.bytes),
        width: Math.max(x(one.last + 1) - x(one.first), 1), height: Math.max(y(one.offset) - y(one.offset + one.bytes), 0.7) });
      element.style.setProperty("--hue", hueOf(number));
      element.addEventListener("pointerenter", () => panel.replaceChildren(html("strong", {}, one.name), definitions([
        ["bytes", one.bytes.toLocaleString("en")], ["at", one.offset.toLocaleString("en")], ["from", operators[one.first]], ["to", operators[one.last]],
        ["kept after the run", one.kept ? "yes" : "no"], ["device", one.device]])));
      drawing.append(element);
    });
    for (let part = 0; part <= 4; part++) {
      drawing.append(svg("text", { class: "label", x: LEFT - 6, y: y(top * part / 4) + 4, "text-anchor": "end" }, `${count(Math.round(top * part / 4))}B`));
    }
    drawing.append(svg("text", { class: "label", x: LEFT, y: HEIGHT - 6 }, "first operator"),
      svg("text", { class: "label", x: width - 4, y: HEIGHT - 6, "text-anchor": "end" }, "last operator"));
  }
  new ResizeObserver(draw).observe(drawing);
  draw();
  place.append(tableOf(`All ${buffers.length} buffers as a table`, ["buffer", "device", "at", "bytes", "first operator", "last operator"], () =>
    buffers.map((one) => [one.name, one.device, one.offset, one.bytes, operators[one.first], operators[one.last]])));
};
