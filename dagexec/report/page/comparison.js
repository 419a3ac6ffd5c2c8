// Runtimes side by side: every run as a point, the quartiles as a box, what was predicted as a tick.
SECTIONS.comparison = (place, { rows }) => {
  const ROW = 34, LEFT = 150;
  const largest = Math.max(...rows.flatMap((row) => [...row.samples, ...row.quartiles, row.predicted])) * 1.05;
  const height = rows.length * ROW + 30;
  const drawing = svg("svg", { class: "chart", role: "img", "aria-label": "Times of all runs by runtime; the table below has the figures" });
  drawing.style.height = `${height}px`;
  place.append(drawing);
  function draw() {
    const width = drawing.getBoundingClientRect().width || 800;
    const x = (milliseconds) => LEFT + milliseconds / largest * (width - LEFT - 10);
    drawing.replaceChildren();
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    rows.forEach((row, number) => {
      const y = number * ROW + ROW / 2, [low, middle, high] = row.quartiles;
      drawing.append(svg("text", { class: "label", x: 2, y: y + 4 }, row.name),
        svg("rect", { class: "box", x: x(low), y: y - 9, width: Math.max(x(high) - x(low), 1), height: 18 }),
        svg("line", { class: "median", x1: x(middle), x2: x(middle), y1: y - 11, y2: y + 11 }),
        svg("line", { class: "predicted", x1: x(row.predicted), x2: x(row.predicted), y1: y - 13, y2: y + 13 }));
      row.samples.forEach((sample, index) => drawing.append(
        svg("circle", { class: "sample", cx: x(sample), cy: y - 6 + (index * 5) % 13, r: 2.2 })));
    });
    for (let part = 0; part <= 4; part++) {
      const at = largest * part / 4;
      drawing.append(svg("line", { class: "axis", x1: x(at), x2: x(at), y1: 0, y2: height - 20 }),
        svg("text", { class: "label", x: x(at), y: height - 6, "text-anchor": part === 4 ? "end" : "middle" }, seconds(at / 1e3)));
    }
  }
  new ResizeObserver(draw).observe(drawing);
  draw();
  place.append(html("p", { class: "path" }, "points: runs; box: quartiles and median; dashed: predicted from SimpleNet's operator times"));
  const figure = (value) => Number(value.toPrecision(4));
  place.append(filledTable(["runtime", "median ms", "quartile 1", "quartile 3", "predicted ms", "speed-up", "bound", "same bytes as SimpleNet"],
    rows.map((row) => [row.name, figure(row.quartiles[1]), figure(row.quartiles[0]), figure(row.quartiles[2]), figure(row.predicted),
      figure(row.speed_up), figure(row.bound), row.same_bytes ? "yes" : "NO"])));
};
