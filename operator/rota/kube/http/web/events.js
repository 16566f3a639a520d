// Requests to the operator, and its stream of changes. Paths are relative: a proxy may serve the page under a prefix.

const SILENT = 40_000; // milliseconds without data; the operator writes at least every 15 s
const LONGEST = 15_000; // milliseconds for a response

async function answered(path, signal) {
  const answer = await fetch(path, { signal, cache: "no-store" });
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({}));
  throw Object.assign(new Error(error ?? `${answer.status} ${answer.statusText}`), { status: answer.status });
}

export async function ask(path, signal) {
  const late = AbortSignal.timeout(LONGEST);
  try {
    return await (await answered(path, AbortSignal.any([signal, late]))).json();
  } catch (error) {
    throw late.aborted && !signal.aborted ? new Error("the operator does not answer") : error;
  }
}

// Reads events until the connection ends; throws the reason. EventSource reports neither a refusal nor silence.
export async function listen(path, signal, { heard, changed }) {
  const ending = new AbortController();
  const end = () => ending.abort();
  signal.addEventListener("abort", end);
  let silence = setTimeout(end, SILENT);
  try {
    const answer = await answered(path, ending.signal);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ; ) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the operator closed the connection");
      clearTimeout(silence);
      silence = setTimeout(end, SILENT);
      heard();
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      if (events.some((it) => it.startsWith("event: changed"))) changed();
    }
  } catch (error) {
    throw ending.signal.aborted && !signal.aborted ? new Error("the operator says nothing any more") : error;
  } finally {
    clearTimeout(silence);
    end();
    signal.removeEventListener("abort", end);
  }
}
