// What schedules covered, as a curve; the story of one that failed, and its swim lanes: time goes down, a step at a time.
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
  const [failure, ...lines] = data.text;
  place.append(html("p", { class: "bad" }, `${data.seed === null ? "" : `Seed ${data.seed} of ${data.strategy}: `}${failure}`));
  const told = lines.filter((line) => !line.startsWith("  "));
  place.append(html("ul", { class: "story" }, ...told.map((line) => html("li", {}, line.replace(/:$/, "")))));
  if (data.command) place.append(html("p", {}, "Again: ", html("code", {}, data.command)));
  if (data.left.length) place.append(html("p", {}, `Threads that had not ended: ${data.left.join(", ")}`));
  drawLanes(place, data);
  place.append(tableOf(`All ${data.steps.length} steps as a table`, ["step", "who", "what", "where", "operators", "although"], () =>
    data.steps.map(([lane, what, where, operators, preempted], step) =>
      [step, data.lanes[lane], what, where, operators, preempted && `${preempted} could go on`])));
}

// Lanes of threads and streams, a row for each step; arrows lead from what lets another lane go on.
function drawLanes(place, { lanes, steps, arrows, findings, inevitable }) {
  const LANE = 150, STEP = 24, TOP = 30, BOX = STEP - 6, MOST = 2000;
  const first = Math.max(0, steps.length - MOST); // of very many the last ones, where it fails; the table has all
  const doomed = inevitable && inevitable.step >= first ? inevitable.step : -1;
  const width = Math.max(lanes.length * LANE, 200), height = TOP + (steps.length - first) * STEP + 10;
  const wrong = new Set(findings.flatMap((finding) => finding.steps));
  const x = (lane) => lane * LANE + 4, y = (step) => TOP + (step - first) * STEP;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": "Swim lanes of the schedule; the table below has the steps" });
  lanes.forEach((lane, number) => {
    drawing.append(svg("line", { class: "axis", x1: x(number) + 8, x2: x(number) + 8, y1: TOP - 6, y2: height }),
      svg("text", { class: "label", x: x(number), y: 14 }, lane.length > 22 ? "…" + lane.slice(-21) : lane));
  });
  if (doomed >= 0) {
    drawing.append(svg("rect", { class: "doomed", x: 0, y: y(doomed) - 1, width, height: height - y(doomed) }));
  }
  for (const [from, to] of arrows) {
    if (from < first) continue;
    const [one, other] = [steps[from][0], steps[to][0]], side = other > one ? 1 : -1;
    const x1 = x(one) + (side > 0 ? LANE - 12 : 0), x2 = x(other) + (side > 0 ? 0 : LANE - 12);
    const y1 = y(from) + BOX / 2, y2 = y(to) + BOX / 2;
    drawing.append(svg("path", { class: "arrow", d: `M${x1} ${y1}C${x1 + side * 18} ${y1} ${x2 - side * 18} ${y2} ${x2} ${y2}m${-side * 5} -4l${side * 5} 4l${-side * 5} 4` }));
  }
  steps.forEach(([lane, what, where, operators, preempted], step) => {
    if (step < first) return;
    const kinds = ["step", operators && "executing", preempted && "preempting", wrong.has(step) && "wrong", step === steps.length - 1 && "failing"];
    const text = operators.replace(/ \(operator \d+\)/g, "") || what;
    const title = [`step ${step}: ${what}`, where && `at ${where}`, operators, preempted && `although ${preempted} could go on`,
      step === doomed && "from here on it could only fail, by trial"].filter(Boolean).join("\n");
    const box = svg("g", {}, svg("title", {}, title),
      svg("rect", { class: kinds.filter(Boolean).join(" "), x: x(lane), y: y(step), width: LANE - 12, height: BOX, rx: 3 }),
      svg("text", { class: "label", x: x(lane) + 5, y: y(step) + 13 }, text.length > 21 ? text.slice(0, 20) + "…" : text));
    drawing.append(box);
  });
  place.append(html("h3", {}, "Swim lanes"), html("div", { class: "lanes table", tabindex: "0" }, drawing), legend(
    [{ class: "step executing" }, "executes or launches an operator"], [{ class: "step preempting" }, "goes on although another thread could (a preemption)"],
    [{ class: "step wrong" }, "is part of what went wrong"], [{ shape: "line", class: "arrow" }, "a lock, a start or a wake-up passes on"],
    ...(doomed >= 0 ? [[{ class: "doomed" }, "from here on it could only fail, by trial"]] : [])));
}
