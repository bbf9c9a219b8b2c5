// The request for a reply, and its stream of events.

import { Refused, stream } from "./api.js";
import { StreamedItems } from "./reply.js";
import { Speed } from "./speed.js";

/**
 * Stream the reply to `body`; `grow(items)` is called with its items so far.
 * Return {response, speed}: the final response object, and how fast it came. Throws Refused and network failures.
 */
export async function streamReply(body, signal, grow) {
  const speed = new Speed();
  const reply = new StreamedItems();
  const events = await stream("POST", "/v1/responses", { ...body, stream: true }, signal);
  try {
    for await (const event of events) {
      if (reply.take(event)) {
        speed.piece();
        grow(reply.items);
      } else if (event.type === "response.failed") {
        throw new Refused(event.response.error?.message ?? "The reply failed; send the message again.");
      } else if (event.type === "response.completed" || event.type === "response.incomplete") {
        return { response: event.response, speed: speed.result(event.response.usage?.output_tokens ?? 0) };
      }
    }
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // fetch raises it when a stream breaks off
  }
  throw new Refused("The connection closed before the reply ended; send the message again.");
}
