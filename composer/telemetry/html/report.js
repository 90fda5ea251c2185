
"use strict";
// Everything is on the page without this; it opens, filters, sorts and zooms.
document.documentElement.classList.add("js");

function openGraph(body, open) {
  body.classList.toggle("open", open);
  body.querySelector(".opener").setAttribute("aria-expanded", String(open));
  body.querySelector("details").open = open;
  if (open) body.querySelectorAll("a.trace").forEach(showTrace);
}

// Equal tracebacks stand once on the page; a graph that is opened gets its own copy.
function showTrace(link) {
  const kept = document.querySelector(link.getAttribute("href") + " pre");
  const pre = document.createElement("pre");
  pre.tabIndex = 0;
  pre.textContent = kept.textContent;
  pre.setAttribute("aria-label", link.textContent);
  link.parentNode.replaceWith(pre);
}

function openTarget() {
  const target = document.getElementById(location.hash.slice(1));
  if (!target) return;
  if (target.matches(".graphs > tbody")) {
    if (target.hidden) clearFilters();
    openGraph(target, true);
    target.scrollIntoView();
    target.querySelector(".opener").focus({ preventScroll: true });
  } else if (target.matches("details")) {
    target.open = true;
    target.scrollIntoView();
  }
}

const byId = (id) => document.getElementById(id);
const bodies = () => [...document.querySelectorAll(".graphs > tbody")];
const texts = new WeakMap();

function textOf(body) {
  if (!texts.has(body)) texts.set(body, body.textContent.toLowerCase());
  return texts.get(body);
}

function filterGraphs() {
  const words = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const engine = byId("engine").value, status = byId("status").value;
  const all = bodies();
  let shown = 0;
  for (const body of all) {
    const fits = (!engine || body.dataset.engine === engine)
      && (!status || body.dataset.status.split(" ").includes(status))
      && words.every((word) => textOf(body).includes(word));
    body.hidden = !fits;
    shown += fits;
  }
  const noun = all.length === 1 ? " graph" : " graphs";
  byId("shown").value = (shown === all.length ? "" : shown.toLocaleString("en") + " of ")
    + all.length.toLocaleString("en") + noun;
}

function clearFilters() {
  for (const id of ["find", "engine", "status"]) byId(id).value = "";
  filterGraphs();
}

function keyOf(body, column) {
  const cell = body.rows[0].cells[column];
  return "key" in cell.dataset ? Number(cell.dataset.key) : cell.textContent.trim().toLowerCase();
}

function sortGraphs(heading) {
  const table = heading.closest("table"), column = heading.cellIndex;
  const was = heading.getAttribute("aria-sort");
  // Of numbers the largest is looked for first.
  const first = heading.classList.contains("number") ? "descending" : "ascending";
  const now = was === null ? first : was === "ascending" ? "descending" : "ascending";
  table.querySelectorAll("[aria-sort]").forEach((each) => each.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", now);
  const sign = now === "ascending" ? 1 : -1;
  const keyed = bodies().map((body) => [keyOf(body, column), body]);
  keyed.sort(([a], [b]) => sign * (a < b ? -1 : a > b ? 1 : 0));
  table.append(...keyed.map(([, body]) => body));
}

// Up and down lead from graph to graph, Home and End to the first and the last.
function moveFocus(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const openers = bodies().filter((body) => !body.hidden).map((body) => body.querySelector(".opener"));
  const here = openers.indexOf(event.target);
  let next;
  if (step && openers[here + step]) next = openers[here + step];
  if (event.key === "Home") next = openers[0];
  if (event.key === "End") next = openers.at(-1);
  if (event.key === " ") event.target.click();
  if (next) next.focus();
  if (next || event.key === " ") event.preventDefault();
}

function setUpGraphs() {
  const table = document.querySelector(".graphs");
  for (const opener of table.querySelectorAll(".opener")) {
    opener.setAttribute("role", "button");
    opener.setAttribute("aria-expanded", "false");
    opener.addEventListener("keydown", moveFocus);
  }
  table.addEventListener("click", (event) => {
    const row = event.target.closest("tr.graph");
    if (!row || String(getSelection())) return;
    event.preventDefault();
    openGraph(row.parentNode, !row.parentNode.classList.contains("open"));
  });
  for (const heading of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sortGraphs(heading));
    heading.append(button);
  }
}

function setUpFilters() {
  for (const id of ["find", "engine", "status"]) byId(id).addEventListener("input", filterGraphs);
  for (const link of document.querySelectorAll("[data-find]")) {
    link.addEventListener("click", () => {
      clearFilters();
      byId("find").value = link.dataset.find;
      filterGraphs();
    });
  }
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.closest("input, select")) return;
    event.preventDefault();
    byId("find").focus();
  });
}

// Where the axis is wider than the window, go to the side where the rows in view have their bars.
function followRows(timeline) {
  const axis = timeline.querySelector(".axis").getBoundingClientRect();
  const label = timeline.querySelector(".axis .label").getBoundingClientRect();
  const rows = [...timeline.querySelectorAll(".row")];
  const row = rows.find((each) => each.getBoundingClientRect().top >= axis.bottom) || rows.at(-1);
  const bar = row.querySelector(".bar").getBoundingClientRect();
  const right = timeline.getBoundingClientRect().right;
  if (bar.right < label.right || bar.left > right) {
    timeline.scrollLeft += bar.left - label.right - (right - label.right) / 8;
  }
}

function setUpTimeline() {
  const timeline = document.querySelector(".timeline"), zoom = byId("zoom");
  let top = 0;
  zoom.addEventListener("input", () => {
    const times = 2 ** Number(zoom.value);
    zoom.setAttribute("aria-valuetext", times.toFixed(1) + " times");
    timeline.style.setProperty("--zoom", times);
    timeline.dataset.level = Math.min(2, Math.floor(Number(zoom.value) / 2));
    followRows(timeline);
  });
  timeline.addEventListener("scroll", () => {
    if (timeline.scrollTop !== top && Number(zoom.value)) followRows(timeline);
    top = timeline.scrollTop;
  });
  byId("longest").addEventListener("input", (event) => {
    timeline.classList.toggle("longest", event.target.checked);
  });
}

document.addEventListener("DOMContentLoaded", () => {
  if (!document.querySelector(".graphs")) return;
  setUpGraphs();
  setUpFilters();
  setUpTimeline();
  openTarget();
  addEventListener("hashchange", openTarget);
});
