// Controller of the page: shows the group in the URL's fragment, or the list, and follows changes.

import * as groups from "./groups.js";
import * as detail from "./detail.js";
import { at, plain, put } from "./dom.js";
import { ask, listen } from "./events.js";
import { time } from "./words.js";

const GAP = 200; // minimal milliseconds between two requests; more if responses take longer
const AGAIN = 2000; // milliseconds before a failed request is tried again

let view = {}; // the view on display: a group, or the list if it has no name
let ending = new AbortController(); // aborts the requests of this view
let asking = false;
let wanted = false;
let hears = false; // whether the stream of changes is connected
let knows = false; // whether the display was current at the last response
let heard = null; // time of the last response or event

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

// Loads the view, one request at a time; changes in between cause one more request, and failures a retry.
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

// Loads and shows a view once; returns false if the request is to be tried again.
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
  knows = error.status < 500; // 4xx is the operator's response; 5xx may come from a proxy without an operator
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
    requestAnimationFrame(() => setTimeout(() => performance.mark("shown"))); // tests and bench measure the first paint by it
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
        refresh(); // changes before the stream was connected were missed
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

// Starts or restarts the view in the URL's fragment; a hidden page has no connections.
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
