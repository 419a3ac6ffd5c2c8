// Tables: the same as a picture, for who cannot see it or wants the figures. Rows come when a table is opened, some at a time.
const ROWS_AT_ONCE = 200;

function tableOf(title, columns, rows) {
  const details = html("details", {}, html("summary", {}, title));
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(filledTable(columns, rows()));
  });
  return details;
}

function filledTable(columns, rows) {
  const body = html("tbody");
  const isNumber = (column) => rows.length > 0 && typeof rows[0][column] === "number";
  const heads = columns.map((name, column) => html("th", isNumber(column) ? { scope: "col", class: "number" } : { scope: "col" }, name));
  const place = html("div", { class: "table", tabindex: "0" }, html("table", {}, html("thead", {}, html("tr", {}, ...heads)), body));
  const more = html("button", { type: "button" }, "More rows");
  let shown = 0;
  const add = () => {
    for (const row of rows.slice(shown, shown + ROWS_AT_ONCE)) {
      body.append(html("tr", {}, ...row.map((cell) =>
        html("td", typeof cell === "number" ? { class: "number" } : {}, typeof cell === "number" ? written(cell) : cell))));
    }
    shown = Math.min(shown + ROWS_AT_ONCE, rows.length);
    more.textContent = `More rows (${rows.length - shown} left)`;
    more.hidden = shown === rows.length;
  };
  more.addEventListener("click", add);
  add();
  return html("div", {}, place, more);
}

// All digits of an integer, six of what is none, however small it is.
function written(number) {
  return number.toLocaleString("en", Number.isInteger(number) ? {} : { maximumSignificantDigits: 6 });
}

function definitions(pairs) {
  const list = html("dl");
  for (const [term, text] of pairs) list.append(html("dt", {}, term), html("dd", {}, text));
  return list;
}
