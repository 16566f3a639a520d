// Asks the sidecar for messages, works each, and says which went well; run it with `node app.mjs`.

const sidecar = `http://${process.env.ROTA ?? "127.0.0.1:9912"}`;

// Does what there is to do; an error means: again, later.
async function work(message) {
  console.log(message.topic, message.attempt, Buffer.from(message.bodyBase64, "base64").toString());
}

async function ask(path, told) {
  const answer = await fetch(sidecar + path, told && { method: "POST", body: JSON.stringify(told) });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

async function turn() {
  const { messages } = await ask("/v1/messages?max=32&wait=10s");
  const results = await Promise.allSettled(messages.map(work));
  const of = (status) => messages.filter((_, at) => results[at].status === status).map(({ id }) => id);
  const [done, failed] = [of("fulfilled"), of("rejected")];
  if (done.length) await ask("/v1/acks", { ids: done });
  if (failed.length) await ask("/v1/nacks", { ids: failed });
}

process.on("SIGTERM", () => process.exit());
for (;;) {
  try {
    await turn();
  } catch (error) { // the sidecar is not there yet
    console.error(error);
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}
