"use strict";
const $ = (id) => document.getElementById(id);
const branches = new Map(); // engine's number -> what is known, its row, its text
const running = new Map();  // lease -> AbortController of our own generate
const MAX_CARDS = 24, MAX_TEXT = 6000;
let key = "", selected = null, dirty = true, mapDirty = true, blocks = [], uses = 0;

const headers = () => ({
  "content-type": "application/json",
  ...(key ? { authorization: "Bearer " + key } : {}),
});

async function call(method, path, body, signal) {
  const reply = await fetch(path, {
    method, signal, headers: headers(), body: body && JSON.stringify(body),
  });
  if (!reply.ok) {
    const told = await reply.json().catch(() => null);
    throw new Error(told?.error?.message ?? "HTTP " + reply.status);
  }
  return reply;
}

// ---- events -----------------------------------------------------------------------------------

async function watch() {
  for (;;) {
    try {
      const reply = await fetch("v1/live", { headers: headers() });
      if (reply.status === 401) { await askForKey(); continue; }
      if (!reply.ok) throw new Error("HTTP " + reply.status);
      $("status").textContent = "live";
      forgetAll();
      await readEvents(reply.body.getReader());
      $("status").textContent = "the server has ended the stream; trying again";
    } catch (error) {
      $("status").textContent = "not connected (" + error.message + "); trying again";
    }
    await new Promise((wake) => setTimeout(wake, 1500));
  }
}

async function readEvents(reader) {
  const decoder = new TextDecoder();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += decoder.decode(value, { stream: true });
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) take(JSON.parse(part.slice(6)));
  }
}

function askForKey() {
  $("status").textContent = "locked";
  const dialog = $("ask");
  if (!dialog.open) dialog.showModal();
  return new Promise((done) => {
    $("key-form").onsubmit = () => { key = $("key").value; $("key").value = ""; done(); };
    dialog.oncancel = (event) => event.preventDefault();
  });
}

function take(event) {
  for (const each of (event.branches ?? []).sort((a, b) => a.id - b.id)) {
    let known = branches.get(each.id);
    if (!known) {
      known = { text: "" };
      branches.set(each.id, known);
    }
    if (each.reset) known.text = "";
    const text = known.text + (each.text ?? "");
    Object.assign(known, each, { text: text.length > MAX_TEXT ? text.slice(-MAX_TEXT) : text });
    known.used = ++uses;
  }
  for (const id of event.gone ?? []) {
    branches.get(id)?.row?.remove();
    branches.get(id)?.card?.root.remove();
    branches.delete(id);
    if (selected === id) selected = null;
  }
  if (event.branches || event.gone) dirty = true;
  if (event.blocks) { blocks = event.blocks; mapDirty = true; }
  if (event.stats) showStats(event.stats);
}

function forgetAll() {
  branches.clear();
  $("branches").replaceChildren();
  $("cards").replaceChildren();
  dirty = true;
}

function showStats(stats) {
  $("model").textContent = stats.model;
  $("s-rate").textContent = stats.tokens_per_s;
  $("s-running").textContent = stats.running;
  $("s-waiting").textContent = stats.waiting;
  $("s-reused").textContent = (100 * stats.reused_share).toFixed(1) + "%";
  $("s-forks").textContent = stats.forks;
  $("s-generated").textContent = stats.generated_tokens;
}

// ---- the list ---------------------------------------------------------------------------------

function inOrder() {
  const below = new Map();
  for (const [id, each] of branches) {
    const parent = branches.has(each.parent) ? each.parent : null;
    if (!below.has(parent)) below.set(parent, []);
    below.get(parent).push(id);
  }
  const order = [], stack = [...(below.get(null) ?? [])].sort((a, b) => b - a).map((id) => [id, 0]);
  while (stack.length) {
    const [id, level] = stack.pop();
    branches.get(id).level = level;
    branches.get(id).isLeaf = !below.has(id);
    order.push(id);
    for (const child of (below.get(id) ?? []).sort((a, b) => b - a)) stack.push([child, level + 1]);
  }
  return order;
}

function makeRow(id) {
  const row = document.createElement("div");
  row.setAttribute("role", "treeitem");
  row.id = "branch-" + id;
  for (const name of ["twig", "dot", "name", "tokens", "snippet"]) {
    const part = document.createElement("span");
    part.className = name;
    row.append(part);
  }
  row.addEventListener("click", () => select(id));
  return row;
}

function drawList() {
  const list = $("branches"), order = inOrder();
  let place = list.firstChild;
  for (const id of order) {
    const each = branches.get(id);
    each.row ??= makeRow(id);
    if (each.row === place) place = place.nextSibling;
    else list.insertBefore(each.row, place);
    const [twig, , name, tokens, snippet] = each.row.children;
    const label = each.lease ? "#" + id : "#" + id + " request";
    each.row.className = "branch " + each.state;
    each.row.setAttribute("aria-level", each.level + 1);
    each.row.setAttribute("aria-selected", selected === id);
    each.row.setAttribute("aria-label",
      `branch ${id}, ${each.state}, ${each.tokens} tokens, level ${each.level + 1}`);
    setText(twig, each.level ? "\u00a0\u00a0".repeat(Math.min(each.level, 24) - 1) + "└" : "");
    setText(name, label);
    setText(tokens, each.tokens);
    setText(snippet, each.text.slice(-60).replace(/\s+/g, " "));
  }
  setText($("count"), order.length);
  $("empty").hidden = order.length > 0;
  if (selected !== null) list.setAttribute("aria-activedescendant", "branch-" + selected);
  else list.removeAttribute("aria-activedescendant");
  drawCards(order);
}

const setText = (node, text) => {
  text = String(text);
  if (node.textContent !== text) node.textContent = text;
};

function select(id) {
  selected = id;
  dirty = true;
  branches.get(id)?.row?.scrollIntoView({ block: "nearest" });
}

// ---- the cards --------------------------------------------------------------------------------

function isUnder(id, top) {
  for (let at = id; at !== null && at !== undefined; at = branches.get(at)?.parent) {
    if (at === top) return true;
  }
  return false;
}

const isBusy = (each) => each.state === "running" || each.state === "waiting";

// What runs comes first, in the order of the list; then what was used last.
function byUse(a, b) {
  const one = branches.get(a), other = branches.get(b);
  return isBusy(other) - isBusy(one) || (isBusy(one) ? 0 : other.used - one.used);
}

function drawCards(order) {
  let wanted = order.filter((id) => branches.get(id).lease && branches.get(id).isLeaf);
  if (selected !== null) {
    const under = wanted.filter((id) => isUnder(id, selected));
    wanted = under.length ? under : branches.get(selected).lease ? [selected] : wanted;
  }
  wanted.sort(byUse);
  const shown = new Set(wanted.slice(0, MAX_CARDS)), box = $("cards");
  const focused = document.activeElement;
  for (const [id, each] of branches) {
    if (each.card && !shown.has(id)) { each.card.root.remove(); each.card = null; }
  }
  let place = box.firstChild;
  for (const id of shown) {
    const each = branches.get(id);
    each.card ??= makeCard(id);
    if (each.card.root === place) place = place.nextSibling;
    else {
      box.insertBefore(each.card.root, place);
      each.card.text.scrollTop = each.card.text.scrollHeight;
    }
    setText(each.card.state, `${each.state}, ${each.tokens} tokens`);
    each.card.stop.disabled = !isBusy(each);
    each.card.go.disabled = !each.card.stop.disabled;
    if (each.card.text.textContent !== each.text) {
      each.card.text.textContent = each.text;
      each.card.text.scrollTop = each.card.text.scrollHeight;
    }
  }
  // A card that moves to another place loses the focus.
  if (box.contains(focused)) focused.focus({ preventScroll: true });
  const left = wanted.length - shown.size;
  setText($("more"), left > 0 ? `and ${left} more: select a branch to see those below it` : "");
}

function makeCard(id) {
  const root = document.createElement("article");
  root.className = "card";
  root.setAttribute("aria-label", "branch " + id);
  const title = document.createElement("h3"), state = document.createElement("span");
  title.append("#" + id, state);
  const text = document.createElement("pre");
  text.tabIndex = 0;
  text.setAttribute("aria-label", "text of branch " + id);
  const row = document.createElement("div");
  row.className = "row";
  const buttons = {};
  for (const [name, label, act] of [
    ["go", "Go on", goOn], ["fork", "Fork", fork], ["stop", "Stop", stop], ["prune", "Prune", prune],
  ]) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = label;
    button.setAttribute("aria-label", label + " branch " + id);
    button.addEventListener("click", () => attempt(() => act(id)));
    buttons[name] = button;
    row.append(button);
  }
  root.append(title, text, row);
  return { root, state, text, ...buttons };
}

// ---- what the user does -----------------------------------------------------------------------

const attempt = async (act) => {
  $("problem").textContent = "";
  try { await act(); } catch (error) {
    if (error.name !== "AbortError") $("problem").textContent = error.message;
  }
};

const leaseOf = (id) => {
  const lease = branches.get(id)?.lease;
  if (!lease) throw new Error("that is somebody's request, not a branch of yours");
  return lease;
};

const sampling = () => ({
  max_tokens: Number($("max").value), temperature: Number($("temperature").value),
});

async function generate(lease) {
  const control = new AbortController();
  running.set(lease, control);
  try {
    const body = { ...sampling(), stream: true };
    const reply = await call("POST", `v1/branches/${lease}/generate`, body, control.signal);
    const reader = reply.body.getReader(), decoder = new TextDecoder();
    // The text comes with the page's own events; this stream is read to keep the work alive.
    for (let tail = ""; ;) {
      const { done, value } = await reader.read();
      if (done) break;
      tail = (tail + decoder.decode(value, { stream: true })).slice(-4000);
      const told = tail.match(/data: (\{"error":.*\})/);
      if (told) throw new Error(JSON.parse(told[1]).error.message);
    }
  } finally {
    running.delete(lease);
  }
}

const goOn = (id) => generate(leaseOf(id));

async function fork(id, n = 2) {
  const reply = await call("POST", `v1/branches/${leaseOf(id)}/fork`, { n });
  const made = (await reply.json()).data;
  await Promise.all(made.map((each) => generate(each.id)));
}

async function stop(id) { running.get(leaseOf(id))?.abort(); }

async function prune(id) {
  const lease = leaseOf(id);
  running.get(lease)?.abort();
  await call("DELETE", `v1/branches/${lease}`);
}

$("prompt").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(async () => {
    const text = $("text").value;
    const body = $("chat").checked
      ? { messages: [{ role: "user", content: text }] } : { prompt: text };
    const root = await (await call("POST", "v1/branches", body)).json();
    const n = Number($("n").value);
    const made = await (await call("POST", `v1/branches/${root.id}/fork`, { n })).json();
    await Promise.all(made.data.map((each) => generate(each.id)));
  });
});

$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("prompt").requestSubmit();
});

$("branches").addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const order = inOrder(), at = order.indexOf(selected);
  const go = (place) => order.length && select(order[Math.max(0, Math.min(place, order.length - 1))]);
  const acts = {
    ArrowDown: () => go(at + 1), ArrowUp: () => go(at < 0 ? 0 : at - 1),
    Home: () => go(0), End: () => go(order.length - 1),
    ArrowLeft: () => branches.has(branches.get(selected)?.parent) && select(branches.get(selected).parent),
    ArrowRight: () => go(at + 1), Escape: () => { selected = null; dirty = true; },
    g: () => attempt(() => goOn(selected)), f: () => attempt(() => fork(selected)),
    s: () => attempt(() => stop(selected)), x: () => attempt(() => prune(selected)),
    Delete: () => attempt(() => prune(selected)),
  };
  if (!acts[event.key]) return;
  event.preventDefault();
  acts[event.key]();
});

// ---- the block map ----------------------------------------------------------------------------

const STATES = ["free", "private", "shared", "cached", "host", "disk"];

function drawMap() {
  const canvas = $("map"), scale = devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * scale), height = Math.round(canvas.clientHeight * scale);
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  const style = getComputedStyle(document.documentElement), context = canvas.getContext("2d");
  const colours = STATES.map((name) => style.getPropertyValue("--" + name).trim());
  const counts = STATES.map(() => 0);
  let total = 0;
  for (let i = 0; i < blocks.length; i += 2) { counts[blocks[i]] += blocks[i + 1]; total += blocks[i + 1]; }
  context.clearRect(0, 0, width, height);
  // Where there are more blocks than cells, a cell stands for several and shows the most used.
  const maxCells = Math.floor((width * height) / (16 * scale * scale));
  const perCell = Math.max(1, Math.ceil(total / Math.max(1, maxCells)));
  const cells = Math.ceil(total / perCell);
  const side = Math.max(1, Math.min(Math.floor(Math.sqrt((width * height) / Math.max(1, cells))), 24 * scale));
  let columns = Math.max(1, Math.floor(width / side));
  let size = side;
  while (Math.ceil(cells / columns) * size > height && size > 1) {
    size -= 1;
    columns = Math.floor(width / size);
  }
  const gap = size > 4 * scale ? scale : 0, rank = [0, 4, 5, 3, 2, 1];
  let block = 0, best = new Uint8Array(cells);
  for (let i = 0; i < blocks.length; i += 2) {
    for (let k = 0; k < blocks[i + 1]; k++, block++) {
      const cell = Math.floor(block / perCell);
      if (rank[blocks[i]] > rank[best[cell]]) best[cell] = blocks[i];
    }
  }
  for (let cell = 0; cell < cells; cell++) {
    context.fillStyle = colours[best[cell]];
    context.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, size - gap, size - gap);
  }
  STATES.forEach((name, i) => setText($("b-" + name), counts[i]));
  setText($("map-text"), `${total - counts[4] - counts[5]} blocks` + (perCell > 1 ? `, ${perCell} a cell` : ""));
}

function frame() {
  if (dirty) { dirty = false; drawList(); }
  if (mapDirty) { mapDirty = false; drawMap(); }
  setTimeout(() => requestAnimationFrame(frame), 60);
}
addEventListener("resize", () => { mapDirty = true; });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { mapDirty = true; });
frame();
watch();
