// The map: one cell per queue, grouped by topic and broker. Tab reaches one cell, arrow keys the others.

import { at, element, keep, plain, put } from "./dom.js";
import { queue as words, queueName } from "./words.js";

const MANY = 1500; // with more queues than this, cells are small
const KINDS = { Releasing: " releasing", Free: " free", Foreign: " foreign" };
const SIGNS = { Free: "", Foreign: "-", Everyone: "*" }; // in the cells of queues without an owner

const numbers = new Map(); // by member, which keeps its number and colour as long as it is listed
const map = at("map");
let cells = [];
let current = null; // the cell that Tab reaches
let told = null; // the cell that the text below the map describes

export const numberOf = (member) => numbers.get(member);

// Neighbouring numbers differ widely in hue; of every forty numbers the second twenty are paler.
export function colour(number) {
  if (!number) return "var(--none)";
  const [saturation, lightness] = [number % 40 > 20 ? 45 : 75, number % 2 ? 78 : 72];
  return `hsl(${(45 + (number - 1) * 138) % 360} ${saturation}% ${lightness}%)`;
}

export function number(members, queues) {
  const there = new Set(members.map(({ name }) => name));
  for (const { owner, to } of queues) for (const name of [owner, to]) if (name != null) there.add(name);
  for (const name of numbers.keys()) if (!there.has(name)) numbers.delete(name);
  const taken = new Set(numbers.values());
  let next = 1;
  for (const name of there) {
    if (numbers.has(name)) continue;
    while (taken.has(next)) next += 1;
    taken.add(next);
    numbers.set(name, next);
  }
}

export function forget() {
  numbers.clear();
  [current, told] = [null, null];
  keep(map, []);
}

export function draw(queues, matches) {
  const blocks = new Map();
  for (const it of queues) {
    const name = `${it.topic} on ${it.broker}`;
    if (!blocks.has(name)) blocks.set(name, []);
    blocks.get(name).push(it);
  }
  map.classList.toggle("many", queues.length > MANY);
  keep(map, blocks, ([name]) => name, block, (section, [, inside]) => {
    keep(section.lastElementChild, inside, ({ id }) => id, cell, (found, it) => fill(found, it, matches));
  });
  cells = [...map.querySelectorAll(".cell")];
  if (!current?.isConnected) point(cells[0] ?? null);
  if (told) tell(told);
}

function block([name]) {
  const section = element("section");
  section.role = "presentation";
  const inside = element("div");
  inside.role = "group";
  inside.ariaLabel = plain(name);
  section.append(element("h3", name), inside);
  section.firstElementChild.ariaHidden = "true"; // a listbox holds groups and options only
  return section;
}

const blank = element("div"); // template: cloning is faster than creating
blank.role = "option";
blank.tabIndex = -1;
blank.ariaSelected = "false";
const cell = () => blank.cloneNode();

function fill(found, it, matches) {
  const label = plain(words(it));
  const [owner, next] = [numbers.get(it.owner), numbers.get(it.to)];
  const kind = `cell${KINDS[it.state] ?? ""}${it.forced ? " forced" : ""}${matches(it) ? "" : " aside"}`;
  const drawn = `${label} ${kind} ${owner} ${next}`;
  if (found.drawn === drawn) return;
  Object.assign(found, { drawn, queue: it, ariaLabel: label, className: kind });
  found.textContent = SIGNS[it.state] ?? `${owner ?? "?"}${it.forced ? "!" : ""}`;
  found.style.cssText = `--owner: ${colour(owner)}; --next: ${colour(next)}`;
}

function point(found) {
  if (current) current.tabIndex = -1;
  current = found;
  if (current) current.tabIndex = 0;
}

function tell(found) {
  told = found.isConnected ? found : null;
  put(at("told"), told ? found.ariaLabel : "");
}

// The cell above or below: the nearest one in the next line of cells in that direction.
function beside(from, step) {
  const here = from.getBoundingClientRect();
  let [found, nearest, line] = [from, Infinity, null];
  for (let number = cells.indexOf(from) + step; cells[number]; number += step) {
    const place = cells[number].getBoundingClientRect();
    if (Math.abs(place.top - here.top) < 2) continue;
    line ??= place.top;
    if (Math.abs(place.top - line) >= 2) break;
    const away = Math.abs(place.left - here.left);
    if (away < nearest) [found, nearest] = [cells[number], away];
  }
  return found;
}

function moved(key, from) {
  const here = cells.indexOf(from);
  if (key === "ArrowLeft") return cells[here - 1];
  if (key === "ArrowRight") return cells[here + 1];
  if (key === "ArrowUp") return beside(from, -1);
  if (key === "ArrowDown") return beside(from, 1);
  return { Home: cells[0], End: cells.at(-1) }[key];
}

const KEYS = new Set(["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"]);

export function start(choose) {
  const of = (event) => event.target.closest(".cell");
  map.addEventListener("mouseover", (event) => of(event) && tell(of(event)));
  map.addEventListener("focusin", (event) => of(event) && (point(of(event)), tell(of(event))));
  map.addEventListener("click", (event) => of(event) && (of(event).focus(), chosen(of(event), choose)));
  map.addEventListener("keydown", (event) => {
    const from = of(event);
    if (!from) return;
    if (event.key === "Enter" || event.key === " ") chosen(from, choose);
    else if (KEYS.has(event.key)) (moved(event.key, from) ?? from).focus();
    else return;
    event.preventDefault();
  });
}

function chosen(found, choose) {
  map.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
  found.ariaSelected = "true";
  choose(queueName(found.queue));
}
