// Controller of the page: shows the group in the URL's fragment, or the list, and follows changes.

import * as groups from "./groups.js";
import * as detail from "./detail.js";
import { byId, plain, setText } from "./dom.js";
import { fetchJson, readEvents } from "./events.js";
import { time } from "./format.js";

const MIN_GAP_MILLISECONDS = 200; // between two requests; more if responses take longer
const RETRY_MILLISECONDS = 2000; // before a failed request is tried again

let view = {}; // the view on display: a group, or the list if it has no name
let requests = new AbortController(); // aborts the requests of this view
let isLoading = false; // whether `refresh` runs
let isRequested = false; // whether `refresh` must load the view once more
let isConnected = false; // whether the stream of changes is connected
let isCurrent = false; // whether the page shows the operator's answer to the last request, be it an error
let lastContact = null; // time of the last response or event

const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

function viewOfUrl() {
  try {
    const [namespace, name] = location.hash.slice(1).split("/").map(decodeURIComponent);
    return namespace && name ? { namespace, name } : {};
  } catch {
    return {};
  }
}

const path = ({ namespace, name }) =>
  name ? `v1/groups/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}` : "v1/groups";

function showLiveness(problem = "") {
  const isLive = isConnected && isCurrent;
  byId("live").classList.toggle("stale", !isLive && Boolean(problem));
  if (isLive) setText(byId("live"), "Live");
  else if (problem) {
    const since = lastContact ? `Stale since ${time(lastContact)}` : "No data yet";
    setText(byId("live"), `${since}: ${problem}. Retrying.`);
  }
}

function noteContact() {
  lastContact = Date.now();
}

// Loads the view, one request at a time; changes in between cause one more request, and failures a retry.
async function refresh() {
  isRequested = true;
  if (isLoading) return;
  isLoading = true;
  try {
    while (isRequested) {
      isRequested = false;
      const started = performance.now();
      const isDone = await load(view, requests.signal);
      await pause(isDone ? Math.max(MIN_GAP_MILLISECONDS, performance.now() - started) : RETRY_MILLISECONDS);
      isRequested ||= !isDone && !document.hidden;
    }
  } finally {
    isLoading = false;
  }
}

// Loads and shows a view once; returns false if the request is to be tried again.
async function load(requested, signal) {
  let response;
  try {
    response = await fetchJson(path(requested), signal);
  } catch (error) {
    if (requested !== view || signal.aborted) return true;
    handleFailure(error);
    return isCurrent; // an error of the request itself would be the same at a retry
  }
  if (requested !== view) return true;
  noteContact();
  isCurrent = true;
  showError("");
  show(response);
  showLiveness();
  return !requested.name || (await detail.explain(path(requested), signal));
}

function handleFailure(error) {
  isCurrent = error.status < 500; // 4xx is the operator's response; 5xx may come from a proxy without an operator
  if (isCurrent) {
    noteContact();
    showError(error.message);
  }
  showLiveness(error.message);
}

function show(response) {
  const { identity, version, leads } = response.operator;
  setText(byId("operator"), `Rota ${version}, operator ${identity}, ${leads ? "leader" : "standby"}`);
  byId("standby").hidden = leads;
  const notice = `The operator ${identity} is a standby: it knows queue owners, but polls no broker, so lag is unknown.`;
  if (!leads) setText(byId("standby"), notice);
  if (view.name) detail.show(response);
  else groups.show(response);
  if (!performance.getEntriesByName("shown").length) {
    // Tests and bench measure the first paint by this mark.
    requestAnimationFrame(() => setTimeout(() => performance.mark("shown")));
  }
}

function showError(sentence) {
  byId("error").hidden = !sentence;
  setText(byId("error"), sentence);
  byId("content").hidden = Boolean(sentence);
}

// Follows the changes of a view until the page leaves it; after an interruption, loads the view and connects again.
async function followChanges(requested, signal) {
  const query = requested.name ? `?group=${encodeURIComponent(`${requested.namespace}/${requested.name}`)}` : "";
  const handlers = {
    onData() {
      noteContact();
      if (isConnected) return;
      isConnected = true;
      refresh(); // changes before the stream was connected were missed
    },
    onChange: refresh,
  };
  while (!signal.aborted) {
    try {
      await readEvents(`v1/events${query}`, signal, handlers);
    } catch (error) {
      if (signal.aborted) return;
      isConnected = false;
      showLiveness(error.message);
    }
    await pause(RETRY_MILLISECONDS);
    if (!signal.aborted) refresh();
  }
}

// Starts or restarts the view in the URL's fragment; a hidden page has no connections.
function startView() {
  requests.abort();
  requests = new AbortController();
  isConnected = false;
  view = viewOfUrl();
  byId("list").hidden = Boolean(view.name);
  byId("detail").hidden = !view.name;
  if (document.hidden) return;
  if (view.name) detail.open(view, path(view));
  document.title = view.name ? plain(`${view.namespace}/${view.name} - Rota`) : "Rota";
  refresh();
  followChanges(view, requests.signal);
}

addEventListener("hashchange", () => {
  isCurrent = false;
  showError("");
  setText(byId("live"), "Loading");
  startView();
  document.querySelector("main:not([hidden]) h1").focus();
});
document.addEventListener("visibilitychange", startView);
groups.start();
detail.start(refresh);
startView();
