// Server-sent events over fetch, which can send a key where EventSource cannot.

/** Yields the data of each event, parsed; ends with the stream, or at [DONE]. */
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
      if (!data.length) continue; // a comment keeps the line open
      if (data[0] === "[DONE]") return;
      yield JSON.parse(data.join("\n"));
    }
  }
}
