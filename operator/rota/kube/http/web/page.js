// The page: which group the address names, what is known of it, and hearing of its changes.

import * as groups from "./groups.js";
import * as detail from "./detail.js";
import { at, plain, put } from "./dom.js";
import { ask, listen } from "./events.js";
import { time } from "./words.js";

const GAP = 200; // milliseconds between two questions at least; more where an answer takes longer
const AGAIN = 2000; // before what failed is tried again

let view = {}; // what is shown: a group, or all where there is no name
let ending = new AbortController(); // of whatever serves this view
let asking = false;
let wanted = false;
let hears = false; // whether the connection stands over which changes are told
let knows = false; // whether what is shown was true when it was last heard from
let heard = null; // when that was

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

function named() {
  try {
    const [namespace, name] = location.hash.slice(1).split("/").map(decodeURIComponent);
    return namespace && name ? { namespace, name } : {};
  } catch {
    return {};
  }
}

const path = ({ namespace, name }) =>
  name ? `v1/groups/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}` : "v1/groups";

function live(why = "") {
  const fresh = hears && knows;
  at("live").classList.toggle("stale", !fresh && Boolean(why));
  if (fresh) put(at("live"), "Live");
  else if (why) {
    const since = heard ? `Stale since ${time(heard)}` : "Nothing is known yet";
    put(at("live"), `${since}: ${why}. Trying again.`);
  }
}

function stillThere() {
  heard = Date.now();
}

// One question at a time; whatever changes meanwhile is one more, and what was not answered is asked again.
async function refresh() {
  wanted = true;
  if (asking) return;
  asking = true;
  try {
    while (wanted) {
      wanted = false;
      const began = performance.now();
      const answered = await look(view, ending.signal);
      await pause(answered ? Math.max(GAP, performance.now() - began) : AGAIN);
      wanted ||= !answered && !document.hidden;
    }
  } finally {
    asking = false;
  }
}

// Returns whether that was answered, or need not be any more.
async function look(asked, signal) {
  let answer;
  try {
    answer = await ask(path(asked), signal);
  } catch (error) {
    if (asked !== view || signal.aborted) return true;
    failed(error);
    return knows;
  }
  if (asked !== view) return true;
  stillThere();
  knows = true;
  fail("");
  show(answer);
  live();
  return !asked.name || (await detail.explain(path(asked), signal));
}

function failed(error) {
  knows = error.status < 500; // a refusal is an answer, too; a proxy without an operator is none
  if (knows) {
    stillThere();
    fail(error.message);
  }
  live(error.message);
}

function show(answer) {
  const { identity, version, leads } = answer.operator;
  put(at("operator"), `Rota ${version}, operator ${identity}, ${leads ? "which leads" : "which stands by"}`);
  at("standby").hidden = leads;
  const words = `The operator ${identity} stands by: it knows who owns what, but asks no broker, so lag is not known.`;
  if (!leads) put(at("standby"), words);
  if (view.name) detail.show(answer);
  else groups.show(answer);
  if (!performance.getEntriesByName("shown").length) {
    requestAnimationFrame(() => setTimeout(() => performance.mark("shown"))); // for who measures the first paint
  }
}

function fail(sentence) {
  at("error").hidden = !sentence;
  put(at("error"), sentence);
  at("known").hidden = Boolean(sentence);
}

async function hear(asked, signal) {
  const query = asked.name ? `?group=${encodeURIComponent(`${asked.namespace}/${asked.name}`)}` : "";
  while (!signal.aborted) {
    const told = {
      heard() {
        stillThere();
        if (hears) return;
        hears = true;
        refresh(); // something may have changed before we could hear of it
      },
      changed: refresh,
    };
    try {
      await listen(`v1/events${query}`, signal, told);
    } catch (error) {
      if (signal.aborted) return;
      hears = false;
      live(error.message);
    }
    await pause(AGAIN);
    if (!signal.aborted) refresh();
  }
}

// Shows what the address names, or goes on with it; a page that nobody sees listens to nothing.
function begin() {
  ending.abort();
  ending = new AbortController();
  hears = false;
  view = named();
  at("list").hidden = Boolean(view.name);
  at("detail").hidden = !view.name;
  if (document.hidden) return;
  if (view.name) detail.begin(view, path(view));
  document.title = view.name ? plain(`${view.namespace}/${view.name} - Rota`) : "Rota";
  refresh();
  hear(view, ending.signal);
}

addEventListener("hashchange", () => {
  knows = false;
  fail("");
  put(at("live"), "Loading");
  begin();
  document.querySelector("main:not([hidden]) h1").focus();
});
document.addEventListener("visibilitychange", begin);
groups.start();
detail.start(refresh);
begin();
