// Server-sent events over fetch, because EventSource cannot send a key.

/** Yield the parsed data of each event, until the stream ends or at [DONE]. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      if (!data.length) continue; // a comment, which only keeps the connection open
      if (data[0] === "[DONE]") return;
      yield JSON.parse(data.join("\n"));
    }
  }
}
