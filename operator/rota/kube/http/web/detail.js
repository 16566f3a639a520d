// View of one group: its figures, members, map, conditions, rebalances, topics and queues.

import { byId, element, plain, renderChildren, renderRows, setText } from "./dom.js";
import { fetchJson } from "./events.js";
import { count, duration, lag, lagStates, queueName, time } from "./format.js";
import { readiness } from "./groups.js";
import * as map from "./map.js";

const PAGE_QUEUES = 100; // queues in the table at once

let group = null;
let shownPath = ""; // path of the group on display
let page = 0;
let selected = ""; // the selected queue, which `explain` explains
let explained = ""; // selected queue and generation of the last explanation

const column = (className, show) => ({ className, show });

const FACTS = [
  ["Members", ({ members, idle }) => count(members) + (idle ? `, ${count(idle)} idle` : "")],
  ["Queues", ({ queues, unowned }) => count(queues) + (unowned ? `, ${count(unowned)} unowned` : "")],
  ["Lag", lag],
  ["Delay", ({ delay }) => duration(delay)],
  ["Retrying", ({ retrying, delayed }) => count(retrying) + (delayed ? `, about ${count(delayed)} delayed` : "")],
  ["Dead letters", ({ dead }) => count(dead)],
  ["Lag states", ({ verdicts }) => lagStates(verdicts)],
  ["Strategy", ({ strategy }) => strategy || "unknown"],
  ["Generation", ({ generation }) => String(generation)],
  ["Consumer group", () => group.atBroker],
  ["Settings at the broker", brokerSettings],
  ["Brokers last polled", () => (group.lookedAt ? time(group.lookedAt) : "unknown")],
];

const queuesNotRead = (states) => Object.entries(states ?? {}).map(([state, queues]) => `${count(queues)} ${state}`);

const obstacles = ({ troubles, queueStates, failing }) =>
  [...queuesNotRead(queueStates), ...(troubles ?? []), ...(failing ?? [])];

const MEMBERS = [
  column("number", swatch),
  column("", memberCell),
  column("", (member) => [member.state, obstacles(member).join("; ")]),
  column("number", ({ queues }) => count(queues)),
  column("number", ({ generation }) => (generation == null ? "unknown" : String(generation))),
  column("number", ({ rate }) => (rate == null ? "unknown" : `${count(rate)}/s`)),
];

const CONDITIONS = ["type", "status", "reason", "message"].map((name) => column("", (condition) => condition[name]));
CONDITIONS.push(column("when", ({ lastTransitionTime: since }) => (since ? time(since) : "unknown")));

const REBALANCES = [
  column("when", ({ at }) => time(at)),
  column("", ({ reason }) => reason),
  column("", ({ message }) => message),
  column("number", ({ generation }) => String(generation)),
  column("number", ({ moved }) => count(moved ?? 0)),
  column("number", ({ forced }) => count(forced ?? 0)),
  column("number", ({ seconds }) => duration(seconds)),
  column("number", ({ longest }) => duration(longest)),
];

const TOPICS = [
  column("", ({ topic }) => topic),
  column("", ({ kind }) => kind),
  column("number", ({ queues }) => count(queues)),
  column("number", lag),
  column("number", ({ delay }) => duration(delay)),
];

const OWNER_BY_STATE = { Free: "none", Foreign: "unmanaged consumer", Everyone: "every member" }; // of queues without one

const QUEUES = [
  column("", queueName),
  column("", ({ state, forced }) => [state, forced ? "forced" : ""]),
  column("", ({ state, owner }) => owner ?? OWNER_BY_STATE[state] ?? "unknown"),
  column("", ({ to }) => to ?? ""),
  column("number", lag),
  column("number", ({ delay }) => duration(delay)),
  column("", ({ verdict }) => verdict ?? "unknown"),
  column("number", ({ committed }) => count(committed)),
  column("number", ({ last }) => count(last)),
];

function swatch({ name }) {
  return (cell) => {
    if (!cell.firstElementChild) cell.append(element("span", "", "swatch"));
    const number = map.numberOf(name);
    setText(cell.firstElementChild, String(number));
    cell.firstElementChild.style.setProperty("--owner", map.colour(number));
  };
}

// A member's name is a button: it filters the map and the table of queues by that name.
function memberCell({ name, origin, version, language, address }) {
  return (cell) => {
    if (!cell.firstElementChild) {
      const button = element("button", "", "plain");
      button.type = "button";
      button.addEventListener("click", () => {
        byId("filter").value = byId("filter").value === button.textContent ? "" : button.textContent;
        applyFilter();
      });
      cell.append(button, element("small"));
    }
    setText(cell.firstElementChild, name);
    const details = [origin === "Foreign" ? "unmanaged" : "", language, version, address];
    setText(cell.lastElementChild, details.filter(Boolean).join(", "));
  };
}

function queueFilter() {
  const text = byId("filter").value.trim().toLowerCase();
  if (!text) return () => true;
  const contains = (name) => name != null && plain(name).toLowerCase().includes(text);
  return (queue) => [queueName(queue), queue.owner, queue.to].some(contains);
}

// Clears the display for another group; `show` fills it when the response is there.
export function open({ namespace, name }, path) {
  if (path === shownPath) return;
  [group, shownPath, page, selected, explained] = [null, path, 0, "", ""];
  byId("filter").value = "";
  setText(byId("name"), `${namespace}/${name}`);
  byId("content").hidden = true;
  for (const id of ["description", "explanation"]) setText(byId(id), "");
  map.clear();
}

export function show(detail) {
  group = detail;
  const { summary } = detail;
  map.assignNumbers(detail.members, detail.queues);
  showState(summary);
  showFacts(summary);
  renderRows(byId("members"), detail.members, ({ name }) => name, MEMBERS);
  renderRows(byId("conditions"), detail.conditions, ({ type }) => type, CONDITIONS);
  renderRows(byId("rebalances"), detail.rebalances, ({ generation, at }) => `${generation} ${at}`, REBALANCES);
  renderRows(byId("topics"), detail.topics, ({ topic }) => topic, TOPICS);
  draw();
}

function showState(summary) {
  if (!byId("state").firstElementChild) byId("state").append(element("span"), ": ", element("span"));
  const [ready, message] = byId("state").children;
  readiness(summary)(ready);
  setText(message, `${summary.message}${summary.moving ? " A handover is in progress." : ""}`);
}

function showFacts(summary) {
  const make = () => {
    const fact = element("div");
    fact.append(element("dt"), element("dd"));
    return fact;
  };
  const fill = (fact, [name, show]) => {
    setText(fact.firstElementChild, name);
    setText(fact.lastElementChild, show(summary));
  };
  renderChildren(byId("facts"), FACTS, ([name]) => name, make, fill);
}

function brokerSettings() {
  const retryCount = (retries) => `${retries} ${retries === 1 ? "retry" : "retries"}`;
  const text = ({ broker, enabled, retries }) => `${broker}: ${enabled ? "on" : "OFF"}, ${retryCount(retries)}`;
  return group.settings.map(text).join("; ") || "unknown";
}

function draw() {
  const matches = queueFilter();
  map.draw(group.queues, matches);
  const queues = group.queues.filter(matches);
  if (byId("order").value === "lag") queues.sort((a, b) => (b.lag ?? -1) - (a.lag ?? -1));
  const pages = Math.max(1, Math.ceil(queues.length / PAGE_QUEUES));
  page = Math.min(page, pages - 1);
  renderRows(byId("queues"), queues.slice(page * PAGE_QUEUES, (page + 1) * PAGE_QUEUES), queueName, QUEUES);
  setText(byId("pages"), `Page ${count(page + 1)} of ${count(pages)}`);
  const isFiltered = queues.length < group.queues.length;
  setText(byId("filter-count"), isFiltered ? `${count(queues.length)} of ${count(group.queues.length)} queues` : "");
  byId("previous").disabled = page === 0;
  byId("next").disabled = page + 1 >= pages;
}

function applyFilter() {
  page = 0;
  if (group) draw();
}

function turnPage(pages) {
  page += pages;
  draw();
}

// Explains the selected queue's owner, once per generation; returns false if the request is to be tried again.
export async function explain(path, signal) {
  const subject = `${selected} ${group?.summary.generation}`;
  if (!selected || subject === explained) return true;
  explained = subject;
  try {
    const { queues, strategy, generation } = await fetchJson(`${path}/why?queue=${encodeURIComponent(selected)}`, signal);
    const text = queues.map((queue) => `${queueName(queue)}: ${queue.why}`).join(" ");
    if (path === shownPath) setText(byId("explanation"), `${text} (${strategy}, generation ${generation})`);
  } catch (error) {
    const isRejected = error.status < 500;
    if (!isRejected) explained = ""; // the request failed: try it again
    if (path === shownPath && !signal.aborted) setText(byId("explanation"), error.message);
    return isRejected || signal.aborted;
  }
  return true;
}

export function start(refresh) {
  byId("filter").addEventListener("input", applyFilter);
  byId("order").addEventListener("change", applyFilter);
  byId("previous").addEventListener("click", () => turnPage(-1));
  byId("next").addEventListener("click", () => turnPage(1));
  map.start(async (queue) => {
    selected = queue;
    if (!(await explain(shownPath, new AbortController().signal))) refresh();
  });
}
