// The page: which conversation is open, which requests are sent, and what the other modules show.

import { get, key, post } from "./api.js";
import { ChunkMap } from "./chunks.js";
import { onEnter } from "./dom.js";
import { List } from "./list.js";
import { ManageDialog } from "./manage.js";
import { Messages } from "./messages.js";
import { Notice } from "./notice.js";
import { streamReply } from "./reply_stream.js";
import { Settings } from "./settings.js";
import { keepSpeed } from "./speed.js";
import { StatePanel } from "./state.js";
import { Tree } from "./tree.js";

const $ = (id) => document.getElementById(id);
const GREETING =
  "The server keeps the KV cache of its conversations, so that a turn computes only new tokens. " +
  "Edit a message, or ask for a reply again: both branches stay.";
let model = "";
let description = ""; // what the server says about a model that comes with it
let tree = new Tree();
let running = null; // the AbortController of the reply that is streaming
let opening = null; // the root of the conversation that is loading

const turnId = (responseId) => responseId?.replace("resp_", "");
const addressed = () => location.hash.slice(1); // the turn whose branch is shown, or the root of its tree
const rootOf = (turn) => turn.slice(0, 16);

const notice = new Notice($("notice"));
const settings = new Settings({ instructions: $("instructions"), fields: [...$("fields").querySelectorAll("input, select")] });
const dialog = new ManageDialog($("manage"), { changed });
const list = new List({ nav: $("trees"), search: $("search"), found: $("found") }, { manage: (row) => dialog.open(row), more: reload });
const messages = new Messages($("messages"), { say, look });
const map = new ChunkMap(
  { canvas: $("chunks"), legend: $("legend"), totals: $("totals"), strip: $("strip") },
  (root) => (location.hash = root),
);
const state = new StatePanel({ map, unseen: $("unseen"), chunkTokens: $("chunk-tokens") }, { reached, lost });

/** Run `act` and show why it failed. The notice stays until the user's next action. */
async function attempt(act) {
  try {
    return await act();
  } catch (error) {
    if (error.name === "AbortError") return undefined;
    if (error.status === 401) askForKey();
    else notice.refuse(error);
    return undefined;
  }
}

function askForKey() {
  const enter = "under Settings, and press Enter.";
  notice.tell(key.get() ? `The server does not know this key; enter another one ${enter}` : `This server needs a key; enter yours ${enter}`);
  $("settings").open = true;
  if (getComputedStyle($("list")).display === "none") $("list").showPopover();
  $("key").focus();
}

// What is shown

function show() {
  const isBusy = running !== null;
  messages.show(tree, { isBusy, greeting: [GREETING, description].filter(Boolean) });
  for (const id of ["push-out", "drop"]) $(id).disabled = !tree.tip || isBusy;
  showState();
}

function showState() {
  state.show({ turn: turnId(tree.tip), isBusy: running !== null, rows: list.rows });
}

/** Load the list, which also names the conversations of the map. */
async function loadList() {
  list.current = tree.root;
  await list.load();
  showState();
}

function reload() {
  return attempt(loadList);
}

/** Update the page after a conversation got a name or was deleted. */
async function changed(root, isDeleted) {
  if (isDeleted && root === tree.root) {
    history.pushState(null, "", location.pathname);
    begin();
  }
  await reload();
  list.focus(root);
}

/** Show the turn that the address names. The browser's history and all links change the address. */
async function visit() {
  const turn = addressed();
  if (!turn) return begin();
  if (rootOf(turn) === tree.root) return revisit(`resp_${turn}`);
  leave();
  opening = rootOf(turn);
  const found = await attempt(() => get(`/v1/pensieve/trees/${encodeURIComponent(rootOf(turn))}`));
  if (opening !== rootOf(turn)) return undefined; // the user opened another one
  opening = null;
  tree = new Tree(found ? rootOf(turn) : null);
  for (const one of found?.data ?? []) tree.add({ ...one, instructions: found.instructions[one.instructions] ?? null });
  const isHere = tree.turns.has(`resp_${turn}`);
  if (found && !isHere && turn !== tree.root) notice.tell("The turn in the address is not shown; this is the latest branch.");
  look(isHere ? `resp_${turn}` : tree.tip);
  messages.toEnd();
  return list.show(tree.root);
}

/** Show another branch of the open conversation. */
function revisit(id) {
  shut();
  if (!running && tree.turns.has(id)) look(id);
  list.show(tree.root);
}

/** Open a new conversation, without turns. */
function begin() {
  leave();
  tree = new Tree();
  settings.show(undefined);
  show();
  list.show(null);
}

function leave() {
  opening = null;
  notice.clear();
  running?.abort();
  shut();
}

function shut() {
  for (const drawer of ["list", "state"]) $(drawer).hidePopover();
}

/** Show the branch through a turn, following the newest child of each turn. */
function look(id) {
  if (id) {
    tree.show(id);
    settings.show(tree.turns.get(tree.tip).instructions ?? null);
    history.replaceState(null, "", `#${turnId(tree.tip)}`);
  } else settings.show(undefined);
  show();
}

// A turn

async function say(input, parent) {
  if (!input.trim() || running) return;
  if (settings.problem) {
    if (!$("text").value) $("text").value = input;
    notice.tell(settings.problem, true);
    return;
  }
  notice.clear();
  const here = tree; // the user may open another conversation meanwhile, which changes `tree`
  const before = here.tip;
  const mine = (running = new AbortController());
  const turn = { id: "running", parent, input, output: [], status: "in_progress", instructions: settings.instructions };
  here.add(turn);
  showSending(true);
  show();
  messages.toEnd();
  let ended;
  try {
    ended = await attempt(() => run(turn, mine.signal, here));
  } finally {
    here.turns.delete(turn.id);
    here.tip = before; // an unfinished turn is not stored
    running = null;
    showSending(false);
  }
  if (ended) {
    here.root = rootOf(turnId(ended.id));
    const { id, status, output, usage } = ended;
    here.add({ ...turn, id, status, output, usage: usage?.pensieve });
  }
  if (tree === here) settle(here, turn, ended, mine.signal.aborted);
  show();
  messages.toEnd();
  await reload();
}

/** Update the page after a reply has ended, failed or was stopped, if its conversation is still open. */
function settle(here, { input, parent }, ended, isStopped) {
  if (ended) {
    settings.isNew = false;
    history.replaceState(null, "", `#${turnId(here.tip)}`);
  } else {
    const isThere = $("text").value || here.children(parent).some((turn) => turn.input === input);
    if (!isThere) $("text").value = input; // give the unsent text back to the user
    if (isStopped) notice.tell(`Stopped; nothing was kept.${isThere ? "" : " Your message is back in the box."}`);
  }
  if (document.activeElement === document.body && matchMedia("(pointer: fine)").matches) $("text").focus();
}

function showSending(isSending) {
  $("send").hidden = isSending;
  $("stop").hidden = !isSending;
}

/** Stream a reply into `turn`; return the final response object. */
async function run(turn, signal, here) {
  const body = { model, input: turn.input, ...settings.sent };
  if (turn.parent) body.previous_response_id = turn.parent;
  const { response, speed } = await streamReply(body, signal, (items) => {
    turn.output = items;
    if (tree === here) messages.grow(items);
  });
  if (speed) keepSpeed(response.id, speed);
  return response;
}

// Losing and regaining the server

function lost(error) {
  if (error.status === 401) askForKey();
  else notice.lost(error);
}

async function reached() {
  notice.reached();
  if (!model) await start();
  else await reload();
  if (addressed() && !tree.root && !running) await visit();
}

async function start() {
  await attempt(async () => {
    const [first] = (await get("/v1/models")).data;
    model = first.id;
    description = first.description ?? "";
    if (addressed()) await visit();
    else show();
    await loadList();
    $("description").textContent = description;
    $("model").textContent = `${model}, up to ${first.max_model_len} tokens`;
  });
}

// The page itself

$("composer").onsubmit = (event) => {
  event.preventDefault();
  const text = $("text").value;
  if (!text.trim() || running || opening) return;
  $("text").value = "";
  say(text, tree.tip);
};
onEnter($("text"), () => $("composer").requestSubmit());
$("stop").onclick = () => running?.abort();
$("new").onclick = () => {
  if (addressed()) history.pushState(null, "", location.pathname);
  begin();
  $("text").focus();
};
async function act(path) {
  notice.clear();
  const response_id = tree.tip;
  await attempt(() => post(path, { response_id }));
}
$("push-out").onclick = () => act("/v1/pensieve/push_out");
$("drop").onclick = () => act("/v1/pensieve/forget_state");
// What a message or a setting was refused for may be mended by the next letter.
for (const id of ["text", "settings"]) $(id).addEventListener("input", () => notice.clear());
$("key").value = key.get();
$("key-form").onsubmit = (event) => {
  event.preventDefault();
  notice.clear();
  key.set($("key").value);
  start();
  state.wake();
};
addEventListener("popstate", visit); // back, forward, and clicks on links of the list
matchMedia("(min-width: 44rem)").onchange = () => $("list").hidePopover();
matchMedia("(min-width: 62rem)").onchange = () => $("state").hidePopover();

show();
await start();
state.watch();
