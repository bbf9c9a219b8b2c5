// What a turn did: where its tokens came from, as a bar and in words, and how fast the reply came.

import { make } from "./dom.js";

// Each colour is that of the tier in the map and its legend.
const PARTS = [
  ["gpu", "gpu_tokens", "found on the device"],
  ["cpu", "cpu_tokens", "copied back from host memory"],
  ["dropped", "recomputed_tokens", "computed again"],
  ["new", "prefilled_tokens", "new"],
];

/** Make the bar of a turn's tokens by origin. */
export function originBar(usage) {
  const bar = Object.assign(make("div", "bar"), { ariaHidden: "true" }); // the words below say the same
  for (const [colour, field] of PARTS) {
    const part = make("span", colour);
    part.style.flexGrow = usage[field];
    bar.append(part);
  }
  return bar;
}

/** Say where a turn's tokens came from. */
export function originWords(usage) {
  const words = PARTS.filter(([, field]) => usage[field]).map(([, field, what]) => `${usage[field]} ${what}`);
  return make("span", "told", `tokens: ${words.join(", ")}`);
}

const seconds = (ms) => `${(ms / 1000).toFixed(ms < 1000 ? 3 : 1)} s`;

/** Say how fast a reply came; see `Speed`. */
export function speedWords({ num_tokens, first_ms, last_ms, tokens_per_s }) {
  if (tokens_per_s === null) return make("span", "speed", `${num_tokens} tokens within ${seconds(last_ms)}`);
  const rate = tokens_per_s.toFixed(tokens_per_s < 10 ? 1 : 0);
  return make("span", "speed", `first token after ${seconds(first_ms)}, then ${rate} tokens/s`);
}
