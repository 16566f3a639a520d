// View of all groups: the list.

import { byId, element, renderRows, setText } from "./dom.js";
import { count, duration, lag, lagStates, time } from "./format.js";

let groups = [];

const fullName = ({ namespace, name }) => `${namespace}/${name}`;
const numberOf = (number, state) => (number ? `${count(number)} ${state}` : "");

export function readiness({ ready, reason }) {
  return (cell) => {
    if (!cell.firstElementChild) cell.append(element("span"), " ", element("span"));
    const [mark, text] = cell.children;
    mark.className = ready ? "good" : "bad";
    setText(mark, ready ? "Ready" : "Not ready");
    setText(text, reason);
  };
}

function link(group) {
  return (cell) => {
    if (!cell.firstElementChild) cell.append(element("a"));
    setText(cell.firstElementChild, fullName(group));
    const target = `#${encodeURIComponent(group.namespace)}/${encodeURIComponent(group.name)}`;
    if (cell.firstElementChild.getAttribute("href") !== target) cell.firstElementChild.setAttribute("href", target);
  };
}

function rebalance({ lastRebalance: last, moving }) {
  const progress = moving ? "A handover is in progress" : "";
  return last ? [`${last.reason}, ${time(last.at)}`, progress] : [progress || "none"];
}

const COLUMNS = [
  { show: link },
  { show: readiness },
  { className: "number", show: ({ members, idle }) => [count(members), numberOf(idle, "idle")] },
  { className: "number", show: ({ queues, unowned }) => [count(queues), numberOf(unowned, "unowned")] },
  { className: "number", show: lag },
  { className: "number", show: ({ delay }) => duration(delay) },
  { show: ({ verdicts }) => lagStates(verdicts) },
  { show: rebalance },
];

export function show(response) {
  groups = response.groups;
  draw();
}

function draw() {
  const filter = byId("list-filter").value.trim().toLowerCase();
  const matching = groups.filter((group) => fullName(group).toLowerCase().includes(filter));
  renderRows(byId("groups"), matching, fullName, COLUMNS);
  const total = `${count(groups.length)} group${groups.length === 1 ? "" : "s"}`;
  setText(byId("list-count"), filter ? `${count(matching.length)} of ${total}` : total);
}

export function start() {
  byId("list-filter").addEventListener("input", draw);
}
