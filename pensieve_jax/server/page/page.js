// The page: conversations, their turns as they come, and where their state is. Text of a model is only ever set
// as textContent.

import { get, key, post, Refused, stream } from "./api.js";
import { ChunkMap } from "./chunks.js";
import { Tree } from "./tree.js";

const $ = (id) => document.getElementById(id);
const map = new ChunkMap($("chunks"), $("legend"), $("totals"));
let model = "";
let tree = new Tree();
let running = null; // the AbortController of the reply that comes
let told = null; // the latest map

const make = (tag, className, text) => Object.assign(document.createElement(tag), { className, textContent: text ?? "" });
const button = (text, act) => Object.assign(make("button", "", text), { type: "button", onclick: act });
const clear = () => ($("notice").textContent = "");
const turnId = (responseId) => responseId?.replace("resp_", "");

/** Do what may be refused, and tell why it was; what was told before goes with what a person does next. */
async function attempt(act) {
  try {
    return await act();
  } catch (error) {
    if (error.name === "AbortError") return undefined;
    if (!(error instanceof Refused || error instanceof TypeError)) throw error;
    $("notice").textContent = error instanceof Refused ? error.message : "The server cannot be reached.";
    return undefined;
  }
}

// Conversations

async function list() {
  const found = await get("/v1/pensieve/trees");
  const rows = found.data.map((row) => {
    const shown = button(row.first_text || "(no text)", () => attempt(() => open(row.root)));
    shown.title = `${row.num_turns} turns`;
    if (row.root === tree.root) shown.setAttribute("aria-current", "true");
    return shown;
  });
  $("trees").replaceChildren(...rows);
}

async function open(root) {
  clear();
  running?.abort();
  const found = await get(`/v1/pensieve/trees/${root}`);
  tree = new Tree(root);
  for (const turn of found.data) tree.add(turn);
  show();
  await list();
}

// Messages

function show() {
  const shown = tree.path.flatMap((turn) => [user(turn), reply(turn)]);
  $("messages").replaceChildren(...shown);
  $("messages").scrollTop = $("messages").scrollHeight;
  for (const id of ["push-out", "forget"]) $(id).disabled = !tree.tip || running !== null;
  if (told) map.draw(told, turnId(tree.tip));
}

function user(turn) {
  const article = make("article", "user");
  const text = make("div", "text", turn.input);
  const tools = make("div", "tools");
  tools.append(button("Edit", () => edit(article, turn)), ...siblings(turn));
  article.append(text, tools);
  return article;
}

/** Other turns with the same beginning: what was edited, and what was said again. */
function siblings(turn) {
  const all = tree.children(turn.parent);
  if (all.length < 2) return [];
  const at = all.indexOf(turn);
  const go = (text, other) => {
    const shown = button(text, () => (tree.show(other.id), show()));
    shown.disabled = !other || running !== null;
    return shown;
  };
  return [go("‹", all[at - 1]), make("span", "", `${at + 1} of ${all.length}`), go("›", all[at + 1])];
}

function edit(article, turn) {
  const text = Object.assign(document.createElement("textarea"), { value: turn.input, rows: 3 });
  const tools = make("div", "tools");
  tools.append(
    button("Send", () => say(text.value, turn.parent)),
    button("Leave it", show),
  );
  article.replaceChildren(text, tools);
  text.focus();
}

function reply(turn) {
  const article = make("article", "reply");
  article.append(make("div", "text", turn.output));
  if (turn.usage) article.append(...account(turn.usage));
  const tools = make("div", "tools");
  if (turn.status !== "in_progress") tools.append(button("Again", () => say(turn.input, turn.parent)));
  if (turn.status === "incomplete") tools.append(make("span", "", "cut at the most tokens of a reply"));
  article.append(tools);
  return article;
}

const PARTS = [
  ["reused", "gpu_tokens", "found on the device"],
  ["swapped", "cpu_tokens", "copied back from host memory"],
  ["recomputed", "recomputed_tokens", "computed again"],
  ["new", "prefilled_tokens", "new"],
];

/** Where a turn's tokens came from, as a bar and in words. */
function account(usage) {
  const bar = make("div", "bar");
  for (const [name, field] of PARTS) {
    const part = make("span", name);
    part.style.flexGrow = usage[field];
    bar.append(part);
  }
  const words = PARTS.filter(([, field]) => usage[field]).map(([, field, what]) => `${usage[field]} ${what}`);
  return [bar, make("div", "told", `tokens: ${words.join(", ")}`)];
}

// A turn

async function say(input, parent) {
  if (!input.trim() || running) return;
  clear();
  const here = tree; // whoever looks at another conversation meanwhile sees that one
  const before = here.tip;
  const mine = (running = new AbortController());
  const turn = { id: "running", parent, input, output: "", status: "in_progress" };
  here.add(turn);
  showSending(true);
  show();
  let ended;
  try {
    ended = await attempt(() => run(turn, mine.signal));
  } finally {
    here.turns.delete(turn.id);
    here.tip = before; // what did not end left no trace
    running = null;
    showSending(false);
  }
  if (ended) {
    here.root = turnId(ended.id).slice(0, 16);
    here.add({ ...turn, id: ended.id, status: ended.status, usage: ended.usage?.pensieve });
  } else if (tree === here) {
    $("text").value ||= input; // back to where it was typed
  }
  show();
  await attempt(list);
}

function showSending(isSending) {
  $("send").hidden = isSending;
  $("stop").hidden = !isSending;
}

/** Stream a reply into `turn`; the response as it ended. */
async function run(turn, signal) {
  const body = { model, input: turn.input, stream: true, temperature: $("temperature").valueAsNumber || 0 };
  body.max_output_tokens = $("max-tokens").valueAsNumber || 200;
  if (turn.parent) body.previous_response_id = turn.parent;
  if ($("instructions").value.trim()) body.instructions = $("instructions").value.trim();
  const shown = $("messages").lastElementChild.querySelector(".text");
  for await (const event of await stream("POST", "/v1/responses", body, signal)) {
    if (event.type === "response.output_text.delta") {
      turn.output += event.delta;
      shown.textContent = turn.output;
      $("messages").scrollTop = $("messages").scrollHeight;
    } else if (event.type === "response.failed") {
      throw new Refused(event.response.error?.message ?? "The reply was lost on the way; send it again.");
    } else if (event.type === "response.completed" || event.type === "response.incomplete") {
      return event.response;
    }
  }
  throw new Refused("The connection ended before the reply did; send it again.");
}

// Where the state is

async function watch() {
  for (;;) {
    await attempt(async () => {
      for await (const map_ of await stream("GET", "/v1/pensieve/chunks?stream=true")) {
        told = map_;
        $("chunk-tokens").textContent = told.chunk_tokens;
        map.draw(told, turnId(tree.tip));
      }
    });
    await new Promise((resume) => setTimeout(resume, 2000)); // the server is gone, or starts anew
  }
}

async function act(path) {
  clear();
  const response_id = tree.tip;
  await attempt(() => post(path, { response_id }));
}

// The page itself

$("composer").onsubmit = (event) => {
  event.preventDefault();
  const text = $("text").value;
  $("text").value = "";
  say(text, tree.tip);
};
$("text").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
};
$("stop").onclick = () => running?.abort();
$("new").onclick = () => {
  clear();
  running?.abort();
  tree = new Tree();
  show();
  attempt(list);
  $("text").focus();
};
$("push-out").onclick = () => act("/v1/pensieve/push_out");
$("forget").onclick = () => act("/v1/pensieve/forget_state");
$("key").value = key.get();
$("key").onchange = () => {
  clear();
  key.set($("key").value);
  start();
};
addEventListener("resize", () => told && map.draw(told, turnId(tree.tip)));

async function start() {
  await attempt(async () => {
    const [first] = (await get("/v1/models")).data;
    model = first.id;
    $("model").textContent = `${model}, up to ${first.max_model_len} tokens`;
    await list();
  });
}

await start();
watch();
