// Formats values as text. An unknown value is shown as "unknown", never as 0.

const NUMBERS = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export const count = (value) => (value == null || !(value >= 0) ? "unknown" : NUMBERS.format(value));

// The lag of a filtered subscription is an upper bound.
export const lag = ({ lag: value, estimate }) => (value != null && estimate ? `at most ${count(value)}` : count(value));

export function duration(seconds) {
  if (seconds == null || !(seconds <= 1e10)) return "unknown"; // above 300 years the value is wrong
  if (seconds < 60) return `${NUMBERS.format(seconds)} s`;
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor((seconds % 3600) / 60)];
  return hours ? `${count(hours)} h ${minutes} min` : `${minutes} min ${Math.floor(seconds % 60)} s`;
}

export function time(text) {
  const date = new Date(text);
  return Number.isNaN(date.getTime()) ? String(text) : date.toLocaleString("sv"); // as in 2026-11-21 08:00:00
}

export const queueName = ({ topic, broker, id }) => `${topic}/${broker}/${id}`;

function ownership({ state, owner, to }) {
  const next = to == null ? "" : `, next ${to}`;
  if (state === "Everyone") return "consumed by every member";
  if (state === "Foreign") return "unmanaged consumer";
  if (state === "Free") return `free${next}`;
  return `${state === "Releasing" ? "being released by" : "owned by"} ${owner ?? "unknown"}${next}`;
}

export function queueText(queue) {
  const forced = queue.forced ? ", forced" : "";
  return `${queueName(queue)}: ${ownership(queue)}${forced}, lag ${lag(queue)}, ${queue.verdict ?? "lag state unknown"}`;
}

export function lagStates(counts) {
  const present = Object.entries(counts ?? {}).filter(([, number]) => number);
  return present.map(([state, number]) => `${state} ${count(number)}`).join(", ") || "unknown";
}
