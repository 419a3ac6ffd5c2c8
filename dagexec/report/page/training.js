// A chart for each metric: every step as a line, held-out samples as points.
SECTIONS.training = (place, { steps, curves, measures }) => {
  const HEIGHT = 200, LEFT = 62, BOTTOM = HEIGHT - 36;
  const most = steps.at(-1) ?? 1;
  for (const [name, values] of Object.entries(curves)) {
    const held = measures.flatMap(([step, metrics]) => typeof metrics[name] === "number" ? [[step, metrics[name]]] : []);
    const numbers = [...values, ...held.map((one) => one[1])].filter((value) => typeof value === "number");
    const low = Math.min(0, ...numbers), high = Math.max(...numbers, low + 1e-12), isTime = name === "seconds a step";
    place.append(html("h3", {}, isTime ? "time of a step" : name));
    chart(place, HEIGHT, `${name} by step`, (drawing, width) => {
      const x = (step) => LEFT + step / most * (width - LEFT - 8), y = (value) => BOTTOM - (value - low) / (high - low) * (BOTTOM - 10);
      axisBeside(drawing, [low, high], y, { left: LEFT, right: width, unit: isTime ? "s" : "" });
      axisBelow(drawing, [0, most], x, { left: LEFT - 10, right: width, top: 0, bottom: BOTTOM, unit: "" });
      drawing.append(svg("text", { class: "label", x: width - 4, y: HEIGHT - 6, "text-anchor": "end" }, "step"));
      let path = "", pen = "M";
      values.forEach((value, index) => {
        if (typeof value !== "number") { pen = "M"; return; }
        path += `${pen}${x(steps[index])} ${y(value)}`;
        pen = "L";
      });
      drawing.append(svg("path", { class: "curve", d: path }));
      for (const [step, value] of held) drawing.append(svg("circle", { class: "sample held", cx: x(step), cy: y(value), r: 4 }));
    });
    place.append(legend([{ shape: "line", class: "curve" }, steps.length > 1 && steps[1] - steps[0] > 1 ? "mean of neighboring steps" : "each step"],
      ...(held.length ? [[{ shape: "circle", class: "sample held" }, "held-out samples"]] : [])));
  }
  place.append(tableOf("All steps as a table", ["step", ...Object.keys(curves)], () =>
    steps.map((step, index) => [step, ...Object.values(curves).map((values) => values[index])])));
};
