// What a check found: a line for each pair that races, which shows the pair in the drawing of the net.
SECTIONS.hazards = (place, { holds, pairs, findings }) => {
  if (holds) {
    place.append(html("p", {}, `Proved: each of the ${pairs.toLocaleString("en")} pairs of conflicting accesses is ordered or mutually exclusive in every schedule.`));
    return;
  }
  place.append(html("p", { class: "bad" }, `${findings.length} of ${pairs.toLocaleString("en")} pairs are not ordered. Red edges in the drawing of the net are those that are missing.`));
  place.append(filledTable(["kind", "on", "first", "then", "missing"],
    findings.map((one) => [one.kind, one.resource, one.earlier, one.later, one.missing])));
};
