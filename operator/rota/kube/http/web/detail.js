// View of one group: its figures, members, map, conditions, rebalances, topics and queues.

import { at, element, keep, plain, put, rows } from "./dom.js";
import { ask } from "./events.js";
import { ready } from "./groups.js";
import * as map from "./map.js";
import { count, duration, lag, queueName, time, verdicts } from "./words.js";

const PAGE = 100; // queues in the table at once

let known = null;
let shown = ""; // path of the group on display
let page = 0;
let asked = ""; // the selected queue, which `explain` explains
let explained = ""; // selected queue and generation of the last explanation

const of = (className, show) => ({ className, show });

const FACTS = [
  ["Members", ({ members, idle }) => count(members) + (idle ? `, ${count(idle)} idle` : "")],
  ["Queues", ({ queues, unowned }) => count(queues) + (unowned ? `, ${count(unowned)} unowned` : "")],
  ["Lag", lag],
  ["Delay", ({ delay }) => duration(delay)],
  ["Retrying", ({ retrying, delayed }) => count(retrying) + (delayed ? `, about ${count(delayed)} delayed` : "")],
  ["Dead letters", ({ dead }) => count(dead)],
  ["Verdicts", (it) => verdicts(it.verdicts)],
  ["Strategy", ({ strategy }) => strategy || "unknown"],
  ["Generation", ({ generation }) => String(generation)],
];

const queuesNotRead = (states) => Object.entries(states ?? {}).map(([state, queues]) => `${count(queues)} ${state}`);

const obstacles = ({ troubles, queueStates, failing }) => [...queuesNotRead(queueStates), ...(troubles ?? []), ...(failing ?? [])];

const MEMBERS = [
  of("number", swatch),
  of("", member),
  of("", (it) => [it.state, obstacles(it).join("; ")]),
  of("number", ({ queues }) => count(queues)),
  of("number", ({ generation }) => (generation == null ? "unknown" : String(generation))),
  of("number", ({ rate }) => (rate == null ? "unknown" : `${count(rate)}/s`)),
];

const CONDITIONS = ["type", "status", "reason", "message"].map((name) => of("", (it) => it[name]));
CONDITIONS.push(of("when", ({ lastTransitionTime: at_ }) => (at_ ? time(at_) : "unknown")));

const REBALANCES = [
  of("when", (it) => time(it.at)),
  of("", ({ reason }) => reason),
  of("", ({ message }) => message),
  of("number", ({ generation }) => String(generation)),
  of("number", ({ moved }) => count(moved ?? 0)),
  of("number", ({ forced }) => count(forced ?? 0)),
  of("number", ({ seconds }) => duration(seconds)),
  of("number", ({ longest }) => duration(longest)),
];

const TOPICS = [
  of("", ({ topic }) => topic),
  of("", ({ kind }) => kind),
  of("number", ({ queues }) => count(queues)),
  of("number", lag),
  of("number", ({ delay }) => duration(delay)),
];

const WITHOUT = { Free: "nobody", Foreign: "a foreigner", Everyone: "every member" }; // shown as owner, by state

const QUEUES = [
  of("", queueName),
  of("", ({ state, forced }) => [state, forced ? "taken by force" : ""]),
  of("", ({ state, owner }) => owner ?? WITHOUT[state] ?? "unknown"),
  of("", ({ to }) => to ?? ""),
  of("number", lag),
  of("number", ({ delay }) => duration(delay)),
  of("", ({ verdict }) => verdict ?? "unknown"),
  of("number", ({ committed }) => count(committed)),
  of("number", ({ last }) => count(last)),
];

function swatch({ name }) {
  return (cell) => {
    if (!cell.firstElementChild) cell.append(element("span", "", "swatch"));
    const number = map.numberOf(name);
    put(cell.firstElementChild, String(number));
    cell.firstElementChild.style.setProperty("--owner", map.colour(number));
  };
}

// A member's name is a button: it filters the map and the table of queues by that name.
function member({ name, origin, version, language, address }) {
  return (cell) => {
    if (!cell.firstElementChild) {
      const button = element("button", "", "plain");
      button.type = "button";
      button.addEventListener("click", () => {
        at("filter").value = at("filter").value === button.textContent ? "" : button.textContent;
        filtered();
      });
      cell.append(button, element("small"));
    }
    put(cell.firstElementChild, name);
    const print = [origin === "Foreign" ? "not Rota's" : "", language, version, address];
    put(cell.lastElementChild, print.filter(Boolean).join(", "));
  };
}

function sought() {
  const text = at("filter").value.trim().toLowerCase();
  if (!text) return () => true;
  return (it) => [queueName(it), it.owner, it.to].some((name) => name != null && plain(name).toLowerCase().includes(text));
}

export function begin({ namespace, name }, path) {
  if (path === shown) return;
  [known, shown, page, asked, explained] = [null, path, 0, "", ""];
  at("filter").value = "";
  put(at("name"), `${namespace}/${name}`);
  at("known").hidden = true;
  for (const id of ["told", "why"]) put(at(id), "");
  map.forget();
}

export function show(detail) {
  known = detail;
  const { summary } = detail;
  map.number(detail.members, detail.queues);
  state(summary);
  facts(summary);
  rows(at("members"), detail.members, ({ name }) => name, MEMBERS);
  rows(at("conditions"), detail.conditions, ({ type }) => type, CONDITIONS);
  rows(at("rebalances"), detail.rebalances, ({ generation, at: when }) => `${generation} ${when}`, REBALANCES);
  rows(at("topics"), detail.topics, ({ topic }) => topic, TOPICS);
  draw();
}

function state(summary) {
  if (!at("state").firstElementChild) at("state").append(element("span"), ": ", element("span"));
  const [first, second] = at("state").children;
  ready(summary)(first);
  put(second, `${summary.message}${summary.moving ? " A handover is under way." : ""}`);
}

function facts(summary) {
  const seen = known.lookedAt ? time(known.lookedAt) : "unknown";
  const told = [...FACTS, ["At the broker", () => known.atBroker], ["Its settings there", settings], ["Brokers last asked", () => seen]];
  const make = () => {
    const made = element("div");
    made.append(element("dt"), element("dd"));
    return made;
  };
  keep(at("facts"), told, ([name]) => name, make, (found, [name, say]) => {
    put(found.firstElementChild, name);
    put(found.lastElementChild, say(summary));
  });
}

function settings() {
  const told = known.settings.map(({ broker, enabled, retries }) => `${broker}: ${enabled ? "on" : "OFF"}, ${retries} retries`);
  return told.join("; ") || "unknown";
}

function draw() {
  const matches = sought();
  map.draw(known.queues, matches);
  const found = known.queues.filter(matches);
  if (at("order").value === "lag") found.sort((a, b) => (b.lag ?? -1) - (a.lag ?? -1));
  const pages = Math.max(1, Math.ceil(found.length / PAGE));
  page = Math.min(page, pages - 1);
  rows(at("queues"), found.slice(page * PAGE, (page + 1) * PAGE), queueName, QUEUES);
  put(at("pages"), `Page ${count(page + 1)} of ${count(pages)}`);
  const fewer = found.length < known.queues.length;
  put(at("filter-count"), fewer ? `${count(found.length)} of ${count(known.queues.length)} queues` : "");
  at("back").disabled = page === 0;
  at("on").disabled = page + 1 >= pages;
}

function filtered() {
  page = 0;
  if (known) draw();
}

function turn(pages) {
  page += pages;
  draw();
}

// Explains the selected queue's owner, once per generation; returns false if the request is to be tried again.
export async function explain(path, signal) {
  const about = `${asked} ${known?.summary.generation}`;
  if (!asked || about === explained) return true;
  explained = about;
  try {
    const { queues, strategy, generation } = await ask(`${path}/why?queue=${encodeURIComponent(asked)}`, signal);
    const told = queues.map((it) => `${queueName(it)}: ${it.why}`).join(" ");
    if (path === shown) put(at("why"), `${told} (${strategy}, generation ${generation})`);
  } catch (error) {
    const refused = error.status < 500;
    if (!refused) explained = ""; // the request failed: try it again
    if (path === shown && !signal.aborted) put(at("why"), error.message);
    return refused || signal.aborted;
  }
  return true;
}

export function start(refresh) {
  at("filter").addEventListener("input", filtered);
  at("order").addEventListener("change", filtered);
  at("back").addEventListener("click", () => turn(-1));
  at("on").addEventListener("click", () => turn(1));
  map.start(async (queue) => {
    asked = queue;
    if (!(await explain(shown, new AbortController().signal))) refresh();
  });
}
