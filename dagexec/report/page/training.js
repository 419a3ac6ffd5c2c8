// A chart for each metric: every step as a line, held-out samples as points.
SECTIONS.training = (place, { steps, curves, measures }) => {
  const HEIGHT = 190, LEFT = 64;
  for (const [name, values] of Object.entries(curves)) {
    const held = measures.flatMap(([step, metrics]) => typeof metrics[name] === "number" ? [[step, metrics[name]]] : []);
    const numbers = [...values, ...held.map((one) => one[1])].filter((value) => typeof value === "number");
    const low = Math.min(0, ...numbers), high = Math.max(...numbers, low + 1e-12);
    const drawing = svg("svg", { class: "chart", role: "img", "aria-label": `${name} by step; the table below has the figures` });
    drawing.style.height = `${HEIGHT}px`;
    place.append(html("h3", {}, name), drawing);
    const draw = () => {
      const width = drawing.getBoundingClientRect().width || 800, most = steps[steps.length - 1] || 1;
      const x = (step) => LEFT + step / most * (width - LEFT - 8), y = (value) => HEIGHT - 22 - (value - low) / (high - low) * (HEIGHT - 34);
      drawing.replaceChildren();
      drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      for (let part = 0; part <= 4; part++) {
        const at = low + (high - low) * part / 4;
        drawing.append(svg("line", { class: "axis", x1: LEFT, x2: width, y1: y(at), y2: y(at) }),
          svg("text", { class: "label", x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, Number(at.toPrecision(3))));
      }
      let path = "", pen = "M";
      values.forEach((value, index) => {
        if (typeof value !== "number") { pen = "M"; return; }
        path += `${pen}${x(steps[index])} ${y(value)}`;
        pen = "L";
      });
      drawing.append(svg("path", { class: "curve", d: path }));
      for (const [step, value] of held) drawing.append(svg("circle", { class: "sample held", cx: x(step), cy: y(value), r: 4 }));
      drawing.append(svg("text", { class: "label", x: width - 4, y: HEIGHT - 6, "text-anchor": "end" }, `step ${most}`));
    };
    new ResizeObserver(draw).observe(drawing);
    draw();
  }
  place.append(tableOf("All steps as a table", ["step", ...Object.keys(curves)], () =>
    steps.map((step, index) => [step, ...Object.values(curves).map((values) => values[index])])));
};
