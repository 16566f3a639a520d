// Requests to the operator, and its stream of changes. Paths are relative: a proxy may serve the page under a prefix.

const SILENCE_MILLISECONDS = 40_000; // longest wait for data in the stream; the operator writes at least every 15 s
const RESPONSE_MILLISECONDS = 15_000; // longest wait for a complete response

async function fetchOk(path, signal) {
  const response = await fetch(path, { signal, cache: "no-store" });
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  throw Object.assign(new Error(error ?? `${response.status} ${response.statusText}`), { status: response.status });
}

export async function fetchJson(path, signal) {
  const timeout = AbortSignal.timeout(RESPONSE_MILLISECONDS);
  try {
    return await (await fetchOk(path, AbortSignal.any([signal, timeout]))).json();
  } catch (error) {
    throw timeout.aborted && !signal.aborted ? new Error("the operator does not respond") : error;
  }
}

// Reads events until the connection ends; throws the reason. EventSource reports neither a refusal nor silence.
export async function readEvents(path, signal, { onData, onChange }) {
  const connection = new AbortController();
  const abort = () => connection.abort();
  signal.addEventListener("abort", abort);
  let silence = setTimeout(abort, SILENCE_MILLISECONDS);
  try {
    const response = await fetchOk(path, connection.signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ; ) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the operator closed the connection");
      clearTimeout(silence);
      silence = setTimeout(abort, SILENCE_MILLISECONDS);
      onData();
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      if (events.some((event) => event.startsWith("event: changed"))) onChange();
    }
  } catch (error) {
    throw connection.signal.aborted && !signal.aborted ? new Error("the operator stopped sending events") : error;
  } finally {
    clearTimeout(silence);
    abort();
    signal.removeEventListener("abort", abort);
  }
}
