// What schedules covered, as a curve; one that failed as swim lanes: time goes down, a step at a time; each lane is a
// thread or a stream.
SECTIONS.exploration = (place, data) => {
  const HEIGHT = 200, LEFT = 62, BOTTOM = HEIGHT - 36;
  place.append(html("p", {}, `${data.chosen}: ${data.tried.toLocaleString("en")} schedules tried, ${data.different.toLocaleString("en")} of them different.`));
  if (data.strategies.length > 1) {
    place.append(tableOf("What each strategy added", ["strategy", "schedules", "handovers that it was the first to meet", "failed"],
      () => data.strategies.map((row) => [...row, data.failed?.strategy === row[0] ? 1 : 0])));
  }
  if (data.failed) drawFailure(place, data.failed);
  if (data.handovers.length < 2) return;
  const [tried, met] = data.handovers.at(-1);
  place.append(html("h3", {}, "Coverage"));
  chart(place, HEIGHT, "Different handovers met by the number of schedules", (drawing, width) => {
    const x = (count) => LEFT + count / tried * (width - LEFT - 8), y = (count) => BOTTOM - count / (met || 1) * (BOTTOM - 10);
    axisBeside(drawing, [0, met], y, { left: LEFT, right: width, unit: "" });
    axisBelow(drawing, [0, tried], x, { left: LEFT - 10, right: width, top: 0, bottom: BOTTOM, unit: "" });
    drawing.append(svg("text", { class: "label", x: width - 4, y: HEIGHT - 6, "text-anchor": "end" }, "schedules"),
      svg("path", { class: "curve", d: data.handovers.map(([count, seen], index) => `${index ? "L" : "M"}${x(count)} ${y(seen)}`).join("") }));
  });
  const before = data.handovers.filter(([count]) => count <= tried * 0.9).at(-1)?.[1] ?? 0;
  place.append(legend([{ shape: "line", class: "curve" }, "different handovers met: a step of one thread and the next of another"]),
    html("p", {}, `${met.toLocaleString("en")} handovers; the last tenth of the schedules brought ${(met - before).toLocaleString("en")} of them. Where the curve is flat, more schedules show little that is new.`),
    tableOf("Coverage as a table", ["schedules", "handovers"], () => data.handovers));
};

function drawFailure(place, data) {
  const LANE = 150, STEP = 22, TOP = 30;
  const { lanes, steps } = data;
  place.append(html("p", { class: "bad" }, `${data.seed === null ? "" : `Seed ${data.seed} of ${data.strategy}: `}${data.failure}`));
  if (data.command) place.append(html("p", {}, "Again: ", html("code", {}, data.command)));
  if (data.left.length) place.append(html("p", {}, `Threads that had not ended: ${data.left.join(", ")}`));
  const width = Math.max(lanes.length * LANE, 200), height = TOP + steps.length * STEP + 10;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": "Swim lanes of the schedule; the table below has the steps" });
  lanes.forEach((lane, number) => {
    drawing.append(svg("line", { class: "axis", x1: number * LANE + 8, x2: number * LANE + 8, y1: TOP - 6, y2: height }),
      svg("text", { class: "label", x: number * LANE + 4, y: 14 }, lane.length > 22 ? "…" + lane.slice(-21) : lane));
  });
  // A drawing of very many steps shows the last ones, where it fails; the table has all.
  const first = Math.max(0, steps.length - 2000);
  steps.forEach(([lane, what], step) => {
    if (step < first) return;
    const x = lane * LANE + 8, y = TOP + (step - first) * STEP + STEP / 2;
    if (step > first && steps[step - 1][0] !== lane) {
      drawing.append(svg("line", { class: "arrow", x1: steps[step - 1][0] * LANE + 8, y1: y - STEP, x2: x, y2: y }));
    }
    drawing.append(svg("circle", { class: step === steps.length - 1 ? "step failing" : "step", cx: x, cy: y, r: 4 }),
      svg("text", { class: "label", x: x + 8, y: y + 4 }, what.length > 20 ? what.slice(0, 19) + "…" : what, svg("title", {}, what)));
  });
  drawing.setAttribute("height", TOP + Math.min(steps.length, 2000) * STEP + 10);
  drawing.setAttribute("viewBox", `0 0 ${width} ${TOP + Math.min(steps.length, 2000) * STEP + 10}`);
  place.append(html("div", { class: "lanes table", tabindex: "0" }, drawing));
  place.append(tableOf(`All ${steps.length} steps as a table`, ["step", "who", "what"], () => steps.map(([lane, what], step) => [step, lanes[lane], what])));
}
