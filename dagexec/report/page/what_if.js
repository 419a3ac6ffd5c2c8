// Predicted time by the number of workers, a line for the host and one for streams, each in its band, and the bound.
SECTIONS.what_if = (place, { rows }) => {
  const HEIGHT = 250, LEFT = 62, BOTTOM = HEIGHT - 40;
  const kinds = [...new Set(rows.map((row) => row.streams > 0))];
  const counts = [...new Set(rows.map((row) => row.workers))].sort((a, b) => a - b);
  const most = counts.at(-1), least = counts[0], largest = Math.max(...rows.map((row) => row.high)) * 1.1;
  chart(place, HEIGHT, "Predicted time by number of workers", (drawing, width) => {
    const x = (workers) => LEFT + 8 + Math.log(workers / least) / (Math.log(most / least) || 1) * (width - LEFT - 24);
    const y = (milliseconds) => BOTTOM - milliseconds / largest * (BOTTOM - 8);
    axisBeside(drawing, [0, largest / 1e3], (at) => y(at * 1e3), { left: LEFT, right: width, unit: "s" });
    let free = 0;
    for (const count of counts) {
      if (x(count) < free) continue; // the text of a number of workers would stand on that of another
      drawing.append(svg("text", { class: "label tick", x: x(count), y: BOTTOM + 16, "text-anchor": "middle" }, String(count)));
      free = x(count) + 24;
    }
    drawing.append(svg("text", { class: "label", x: width - 4, y: HEIGHT - 6, "text-anchor": "end" }, "workers"));
    for (const streams of kinds) {
      const line = rows.filter((row) => row.streams > 0 === streams);
      const path = (key) => line.map((row, index) => `${index && row.workers > line[index - 1].workers ? "L" : "M"}${x(row.workers)} ${y(row[key])}`).join("");
      const back = [...line].reverse().map((row) => `L${x(row.workers)} ${y(row.low)}`).join("");
      drawing.append(svg("path", { class: streams ? "band streams" : "band", d: `${path("high")}${back}Z` }));
      drawing.append(svg("path", { class: "bound", d: path("bound") }), svg("path", { class: streams ? "curve streams" : "curve", d: path("predicted") }));
      for (const row of line) drawing.append(svg("circle", { class: "sample", cx: x(row.workers), cy: y(row.predicted), r: 3.5 }));
    }
  });
  place.append(legend([{ shape: "line", class: "curve" }, "predicted, each worker on a core of its own"],
    [{ class: "band" }, "by the quartiles of the operators' times"],
    ...(kinds.includes(true) ? [[{ shape: "line", class: "curve streams" }, "on streams of a device"]] : []), [{ shape: "line", class: "bound" }, "no schedule is faster"]));
  const figure = (value) => Number(value.toPrecision(4));
  place.append(filledTable(["workers", "streams", "predicted ms", "quartiles ms", "bound ms", "speed-up"],
    rows.map((row) => [row.workers, row.streams, figure(row.predicted), `${figure(row.low)} to ${figure(row.high)}`, figure(row.bound), figure(row.speed_up)])));
};
