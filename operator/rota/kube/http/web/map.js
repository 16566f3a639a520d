// The map: one cell per queue, grouped by topic and broker. Tab reaches one cell, arrow keys the others.

import { byId, element, plain, renderChildren, setText } from "./dom.js";
import { queueName, queueText } from "./format.js";

const MANY_QUEUES = 1500; // with more queues than this, cells are small
const CLASS_BY_STATE = { Releasing: " releasing", Free: " free", Foreign: " foreign" };
const SIGN_BY_STATE = { Free: "", Foreign: "-", Everyone: "*" }; // in the cells of queues without an owner

const numbers = new Map(); // by member, which keeps its number and colour as long as it is listed
const map = byId("map");
let cells = [];
let tabStop = null; // the cell that Tab reaches
let described = null; // the cell that the text below the map describes

export const numberOf = (member) => numbers.get(member);

// Neighbouring numbers differ widely in hue; of every forty numbers the second twenty are paler.
export function colour(number) {
  if (!number) return "var(--none)";
  const [saturation, lightness] = [number % 40 > 20 ? 45 : 75, number % 2 ? 78 : 72];
  return `hsl(${(45 + (number - 1) * 138) % 360} ${saturation}% ${lightness}%)`;
}

export function assignNumbers(members, queues) {
  const names = new Set(members.map(({ name }) => name));
  for (const { owner, to } of queues) for (const name of [owner, to]) if (name != null) names.add(name);
  for (const name of numbers.keys()) if (!names.has(name)) numbers.delete(name);
  const taken = new Set(numbers.values());
  let next = 1;
  for (const name of names) {
    if (numbers.has(name)) continue;
    while (taken.has(next)) next += 1;
    taken.add(next);
    numbers.set(name, next);
  }
}

export function clear() {
  numbers.clear();
  [tabStop, described] = [null, null];
  renderChildren(map, []);
}

export function draw(queues, matches) {
  const blocks = new Map();
  for (const queue of queues) {
    const name = `${queue.topic} on ${queue.broker}`;
    if (!blocks.has(name)) blocks.set(name, []);
    blocks.get(name).push(queue);
  }
  map.classList.toggle("many", queues.length > MANY_QUEUES);
  renderChildren(map, blocks, ([name]) => name, makeBlock, (section, [, inside]) => {
    renderChildren(section.lastElementChild, inside, ({ id }) => id, makeCell, (cell, queue) => fill(cell, queue, matches));
  });
  cells = [...map.querySelectorAll(".cell")];
  if (!tabStop?.isConnected) setTabStop(cells[0] ?? null);
  if (described) describe(described);
}

function makeBlock([name]) {
  const section = element("section");
  section.role = "presentation";
  const inside = element("div");
  inside.role = "group";
  inside.ariaLabel = plain(name);
  section.append(element("h3", name), inside);
  section.firstElementChild.ariaHidden = "true"; // a listbox holds groups and options only
  return section;
}

const template = element("div"); // cloning is faster than creating
template.role = "option";
template.tabIndex = -1;
template.ariaSelected = "false";
const makeCell = () => template.cloneNode();

function fill(cell, queue, matches) {
  const label = plain(queueText(queue));
  const [owner, next] = [numbers.get(queue.owner), numbers.get(queue.to)];
  const forced = queue.forced ? " forced" : "";
  const className = `cell${CLASS_BY_STATE[queue.state] ?? ""}${forced}${matches(queue) ? "" : " aside"}`;
  const drawn = `${label} ${className} ${owner} ${next}`;
  if (cell.drawn === drawn) return;
  Object.assign(cell, { drawn, queue, ariaLabel: label, className });
  cell.textContent = SIGN_BY_STATE[queue.state] ?? `${owner ?? "?"}${queue.forced ? "!" : ""}`;
  cell.style.cssText = `--owner: ${colour(owner)}; --next: ${colour(next)}`;
}

function setTabStop(cell) {
  if (tabStop) tabStop.tabIndex = -1;
  tabStop = cell;
  if (tabStop) tabStop.tabIndex = 0;
}

function describe(cell) {
  described = cell.isConnected ? cell : null;
  setText(byId("description"), described ? cell.ariaLabel : "");
}

// The cell above or below: the nearest one in the next line of cells in that direction.
function verticalNeighbour(from, step) {
  const origin = from.getBoundingClientRect();
  let [found, nearest, line] = [from, Infinity, null];
  for (let index = cells.indexOf(from) + step; cells[index]; index += step) {
    const place = cells[index].getBoundingClientRect();
    if (Math.abs(place.top - origin.top) < 2) continue;
    line ??= place.top;
    if (Math.abs(place.top - line) >= 2) break;
    const distance = Math.abs(place.left - origin.left);
    if (distance < nearest) [found, nearest] = [cells[index], distance];
  }
  return found;
}

function neighbour(key, from) {
  const index = cells.indexOf(from);
  if (key === "ArrowLeft") return cells[index - 1];
  if (key === "ArrowRight") return cells[index + 1];
  if (key === "ArrowUp") return verticalNeighbour(from, -1);
  if (key === "ArrowDown") return verticalNeighbour(from, 1);
  return { Home: cells[0], End: cells.at(-1) }[key];
}

const KEYS = new Set(["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"]);

export function start(onSelect) {
  const cellOf = (event) => event.target.closest(".cell");
  map.addEventListener("mouseover", (event) => cellOf(event) && describe(cellOf(event)));
  map.addEventListener("focusin", (event) => cellOf(event) && (setTabStop(cellOf(event)), describe(cellOf(event))));
  map.addEventListener("click", (event) => cellOf(event) && (cellOf(event).focus(), select(cellOf(event), onSelect)));
  map.addEventListener("keydown", (event) => {
    const from = cellOf(event);
    if (!from) return;
    if (event.key === "Enter" || event.key === " ") select(from, onSelect);
    else if (KEYS.has(event.key)) (neighbour(event.key, from) ?? from).focus();
    else return;
    event.preventDefault();
  });
}

function select(cell, onSelect) {
  map.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
  cell.ariaSelected = "true";
  onSelect(queueName(cell.queue));
}
