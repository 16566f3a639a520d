// Requests messages from the sidecar, processes each, and acknowledges or rejects it; run it with `node app.mjs`.

const sidecar = `http://${process.env.ROTA ?? "127.0.0.1:9912"}`;

// Processes a message; after an error it is retried later.
async function processMessage(message) {
  console.log(message.topic, message.attempt, Buffer.from(message.bodyBase64, "base64").toString());
}

async function send(path, body) {
  const response = await fetch(sidecar + path, body && { method: "POST", body: JSON.stringify(body) });
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

async function processMessages() {
  const { messages } = await send("/v1/messages?max=32&wait=10s");
  const results = await Promise.allSettled(messages.map(processMessage));
  const idsByStatus = { fulfilled: [], rejected: [] };
  results.forEach(({ status }, index) => idsByStatus[status].push(messages[index].id));
  if (idsByStatus.fulfilled.length) await send("/v1/acks", { ids: idsByStatus.fulfilled });
  if (idsByStatus.rejected.length) await send("/v1/nacks", { ids: idsByStatus.rejected });
}

process.on("SIGTERM", () => process.exit());
for (;;) {
  try {
    await processMessages();
  } catch (error) { // the sidecar has not started yet, or was restarted
    console.error(error);
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}
