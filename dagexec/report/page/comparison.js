// Runtimes side by side: every run as a point, so that the shape of a distribution is seen; quartiles; the prediction.
SECTIONS.comparison = (place, { rows }) => {
  const ROW = 62, RADIUS = 2.2, AXIS = 22;
  const values = rows.flatMap((row) => [...row.quartiles, ...(row.predicted === null ? [] : [row.predicted])]);
  const sorted = rows.flatMap((row) => row.samples).sort((a, b) => a - b);
  // A few runs that were interrupted would press all others together: they stand at the edge.
  const largest = Math.max(...values, sorted[Math.floor(sorted.length * 0.98)] ?? 0) * 1.04;
  const smallest = Math.min(...values, ...sorted), from = smallest > 0.6 * largest ? smallest - 0.1 * (largest - smallest) : 0;
  chart(place, rows.length * ROW + AXIS, "Times of all runs by runtime", (drawing, width) => {
    const left = 6, right = width - 8;
    const x = (milliseconds) => left + (Math.min(milliseconds, largest) - from) / (largest - from) * (right - left);
    axisBelow(drawing, [from / 1e3, largest / 1e3], (at) => x(at * 1e3), { left: 0, right: width, top: 0, bottom: rows.length * ROW, unit: "s" });
    rows.forEach((row, number) => {
      const y = number * ROW + 38, [low, middle, high] = row.quartiles;
      drawing.append(svg("text", { class: "label name", x: 2, y: y - 24 }, row.name, svg("tspan", { class: "label" }, `: ${seconds(middle / 1e3)}${said(row)}`)),
        svg("rect", { class: "box", x: x(low), y: y - 14, width: Math.max(x(high) - x(low), 1), height: 28 }));
      const heaps = new Map();
      for (const sample of row.samples) {
        const heap = Math.round(x(sample) / (2 * RADIUS)), height = heaps.get(heap) ?? 0;
        heaps.set(heap, height + 1);
        const away = Math.ceil(height / 2) * 2 * RADIUS * (height % 2 ? 1 : -1);
        drawing.append(svg("circle", { class: sample > largest ? "sample beyond" : "sample", cx: x(sample), cy: y + Math.max(-16, Math.min(16, away)), r: RADIUS }));
      }
      drawing.append(svg("line", { class: "median", x1: x(middle), x2: x(middle), y1: y - 16, y2: y + 16 }));
      if (row.predicted !== null) drawing.append(svg("line", { class: "predicted", x1: x(row.predicted), x2: x(row.predicted), y1: y - 18, y2: y + 18 }));
    });
  });
  const beyond = sorted.filter((sample) => sample > largest).length;
  place.append(legend([{ shape: "circle", class: "sample" }, "a run"], [{ class: "box" }, "quartiles"], [{ shape: "line", class: "median" }, "median"],
    [{ shape: "line", class: "predicted" }, "predicted from SimpleNet's operator times"],
    ...(beyond ? [[{ shape: "circle", class: "sample beyond" }, `${beyond} ${beyond === 1 ? "run" : "runs"} beyond the edge, up to ${seconds(sorted.at(-1) / 1e3)}`]] : [])));
  const remarks = rows.flatMap((row) => row.remarks.map((remark) => html("li", {}, `${row.name}: ${remark}`)));
  if (remarks.length) place.append(html("ul", { class: "remarks" }, ...remarks));
  const figure = (value) => value === null ? "" : Number(value.toPrecision(4));
  place.append(filledTable(["runtime", "runs", "median ms", "quartile 1", "quartile 3", "predicted ms", "speed-up", "interval", "bound", "largest difference"],
    rows.map((row) => [row.name, row.samples.length, figure(row.quartiles[1]), figure(row.quartiles[0]), figure(row.quartiles[2]), figure(row.predicted),
      figure(row.speed_up), row.interval ? row.interval.map(short).join(" to ") : "", figure(row.bound), row.same_bytes ? "same bytes" : row.difference === null ? "not comparable" : row.difference.toPrecision(2)])));

  function short(value) { return value.toPrecision(3); }
  function said(row) {
    if (!row.interval) return "";
    return row.finding === "no measurable difference" ? `, ${row.finding}` : `, ${short(row.speed_up)}× (${row.interval.map(short).join(" to ")})`;
  }
};
