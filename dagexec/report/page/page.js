// Draws each section where its heading stands.
const sections = JSON.parse(document.getElementById("data").textContent);
const links = html("ul");
for (const { kind, data } of sections) {
  const place = document.getElementById(kind);
  const link = html("a", { href: `#${kind}` }, place.querySelector("h2").textContent);
  links.append(html("li", {}, link));
  SECTIONS[kind](place, data);
}
if (sections.length > 1) document.querySelector("nav").append(links);
document.documentElement.dataset.drawn = "true";
