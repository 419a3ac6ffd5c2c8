// Predicted time by the number of workers, a line for the host and one for each number of streams, and the bound.
SECTIONS.what_if = (place, { rows }) => {
  const HEIGHT = 240, LEFT = 70;
  const drawing = svg("svg", { class: "chart", role: "img", "aria-label": "Predicted time by number of workers; the table below has the figures" });
  drawing.style.height = `${HEIGHT}px`;
  place.append(drawing);
  const kinds = [...new Set(rows.map((row) => row.streams > 0))];
  const most = Math.max(...rows.map((row) => row.workers)), largest = Math.max(...rows.map((row) => row.predicted)) * 1.1;
  function draw() {
    const width = drawing.getBoundingClientRect().width || 800;
    const x = (workers) => LEFT + Math.log2(workers) / (Math.log2(most) || 1) * (width - LEFT - 20);
    const y = (milliseconds) => HEIGHT - 30 - milliseconds / largest * (HEIGHT - 45);
    drawing.replaceChildren();
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    for (let part = 0; part <= 4; part++) {
      const at = largest * part / 4;
      drawing.append(svg("line", { class: "axis", x1: LEFT, x2: width, y1: y(at), y2: y(at) }),
        svg("text", { class: "label", x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, seconds(at / 1e3)));
    }
    for (const streams of kinds) {
      const line = rows.filter((row) => row.streams > 0 === streams);
      const path = (key) => line.map((row, index) => `${index ? "L" : "M"}${x(row.workers)} ${y(row[key])}`).join("");
      drawing.append(svg("path", { class: "bound", d: path("bound") }), svg("path", { class: streams ? "curve streams" : "curve", d: path("predicted") }));
      for (const row of line) {
        drawing.append(svg("circle", { class: "sample", cx: x(row.workers), cy: y(row.predicted), r: 3.5 }),
          svg("text", { class: "label", x: x(row.workers), y: HEIGHT - 12, "text-anchor": "middle" }, String(row.workers)));
      }
    }
  }
  new ResizeObserver(draw).observe(drawing);
  draw();
  place.append(html("p", { class: "path" }, "solid: predicted; dashed: no schedule is faster. Each worker has a core of its own."));
  const figure = (value) => Number(value.toPrecision(4));
  place.append(filledTable(["workers", "streams", "predicted ms", "bound ms", "speed-up"],
    rows.map((row) => [row.workers, row.streams, figure(row.predicted), figure(row.bound), figure(row.speed_up)])));
};
