// The plan of the arena: operators from left to right, addresses from bottom to top, a rectangle for each buffer.
SECTIONS.memory = (place, data) => {
  const HEIGHT = 330, LEFT = 62, BOTTOM = HEIGHT - 24;
  const { buffers, operators } = data;
  const top = Math.max(1, ...buffers.map((one) => one.offset + one.bytes));
  const panel = html("div", { class: "panel" }, "Point at a buffer.");
  const percent = data.unshared ? ` (${Math.round(data.peak / data.unshared * 100)}%)` : "";
  place.append(html("p", {}, `The arena has ${count(data.peak)}B${percent} of the ${count(data.unshared)}B that all buffers together are; ` +
    (data.lower_bound ? `no plan needs less than ${count(data.lower_bound)}B.` : "the least that any plan needs was not computed.")));
  chart(place, HEIGHT, "Buffers over the operators that use them", (drawing, width) => {
    const x = (operator) => LEFT + operator / operators.length * (width - LEFT - 4);
    const y = (offset) => BOTTOM - offset / top * (BOTTOM - 10);
    axisBeside(drawing, [0, top], y, { left: LEFT, right: width, unit: "B" });
    for (const one of buffers) {
      const element = svg("rect", { class: one.name === "working memory" ? "buffer working" : "buffer", x: x(one.first), y: y(one.offset + one.bytes),
        width: Math.max(x(one.last + 1) - x(one.first), 1), height: Math.max(y(one.offset) - y(one.offset + one.bytes), 0.7) });
      element.style.setProperty("--hue", hueOf(one.chain));
      element.addEventListener("pointerenter", () => panel.replaceChildren(html("strong", {}, one.name), definitions([
        ["bytes", one.bytes.toLocaleString("en")], ["at", one.offset.toLocaleString("en")], ["from", operators[one.first]], ["to", operators[one.last]],
        ["kept after the run", one.kept ? "yes" : "no"], ["device", one.device]])));
      drawing.append(element);
    }
    drawing.append(svg("text", { class: "label", x: LEFT, y: HEIGHT - 6 }, "first operator"),
      svg("text", { class: "label", x: width - 4, y: HEIGHT - 6, "text-anchor": "end" }, "last operator"));
  });
  place.append(legend([{ class: "buffer", hue: hueOf(0) }, "a buffer, in the color of the chain that writes it"],
    ...(buffers.some((one) => one.name === "working memory") ? [[{ class: "buffer working" }, "working memory of an operator"]] : [])), panel);
  place.append(tableOf(`All ${buffers.length} buffers as a table`, ["buffer", "device", "at", "bytes", "first operator", "last operator"], () =>
    buffers.map((one) => [one.name, one.device, one.offset, one.bytes, operators[one.first], operators[one.last]])));
};
