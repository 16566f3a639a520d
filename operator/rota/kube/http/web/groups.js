// View of all groups: the list.

import { at, element, put, rows } from "./dom.js";
import { count, duration, lag, time, verdicts } from "./words.js";

let known = [];

const title = ({ namespace, name }) => `${namespace}/${name}`;
const beside = (number, what) => (number ? `${count(number)} ${what}` : "");

export function ready({ ready: well, reason }) {
  return (cell) => {
    if (!cell.firstElementChild) cell.append(element("span"), " ", element("span"));
    const [mark, why] = cell.children;
    mark.className = well ? "good" : "bad";
    put(mark, well ? "Ready" : "Not ready");
    put(why, reason);
  };
}

function link(group) {
  return (cell) => {
    if (!cell.firstElementChild) cell.append(element("a"));
    put(cell.firstElementChild, title(group));
    const to = `#${encodeURIComponent(group.namespace)}/${encodeURIComponent(group.name)}`;
    if (cell.firstElementChild.getAttribute("href") !== to) cell.firstElementChild.setAttribute("href", to);
  };
}

function rebalance({ lastRebalance: last, moving }) {
  const now = moving ? "A handover is under way" : "";
  return last ? [`${last.reason}, ${time(last.at)}`, now] : [now || "none"];
}

const COLUMNS = [
  { show: link },
  { show: ready },
  { className: "number", show: ({ members, idle }) => [count(members), beside(idle, "idle")] },
  { className: "number", show: ({ queues, unowned }) => [count(queues), beside(unowned, "unowned")] },
  { className: "number", show: lag },
  { className: "number", show: ({ delay }) => duration(delay) },
  { show: (it) => verdicts(it.verdicts) },
  { show: rebalance },
];

export function show(answer) {
  known = answer.groups;
  draw();
}

function draw() {
  const sought = at("list-filter").value.trim().toLowerCase();
  const found = known.filter((it) => title(it).toLowerCase().includes(sought));
  rows(at("groups"), found, title, COLUMNS);
  put(at("list-count"), `${sought ? `${count(found.length)} of ` : ""}${count(known.length)} group${known.length === 1 ? "" : "s"}`);
}

export function start() {
  at("list-filter").addEventListener("input", draw);
}
