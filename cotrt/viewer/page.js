"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const nodes = data.nodes;
  const winners = new Set(data.winners);
  const canvas = document.getElementById("tree");
  const stage = document.getElementById("stage");
  const panel = document.getElementById("panel");
  const context = canvas.getContext("2d");
  const WIDTH = 200, HEIGHT = 46, GAP_X = 46, GAP_Y = 12;

  // ---- the tree: children, values, layout -------------------------------------------------

  for (const node of nodes) {
    node.children = [];
    node.folded = false;
    node.number = node.value ?? node.score;
    node.line = oneLine(node.text);
    node.sampled = node.logprobs.filter((x) => x !== null);
  }
  for (const node of nodes) if (node.parent !== null) nodes[node.parent].children.push(node);
  // Parents come before their children, so that a walk backwards sees children first.
  for (let i = nodes.length - 1; i >= 0; i--) {
    nodes[i].below = nodes[i].children.reduce((sum, child) => sum + 1 + child.below, 0);
  }
  const numbers = nodes.map((node) => node.number).filter((x) => x !== null && x !== undefined);
  const low = Math.min(...numbers), high = Math.max(...numbers);

  let shown = [];
  let bounds = { width: 1, height: 1 };

  function layout() {
    shown = [];
    let row = 0, width = 0;
    // Depth first without recursion: a node is placed after its children.
    const stack = nodes.length ? [[nodes[0], 0, false]] : [];
    while (stack.length) {
      const [node, depth, placed] = stack.pop();
      const open = node.folded ? [] : node.children;
      if (!placed && open.length) {
        stack.push([node, depth, true]);
        for (let i = open.length - 1; i >= 0; i--) stack.push([open[i], depth + 1, false]);
        continue;
      }
      node.x = depth * (WIDTH + GAP_X);
      if (open.length) node.y = (open[0].y + open[open.length - 1].y) / 2;
      else node.y = row++ * (HEIGHT + GAP_Y);
      width = Math.max(width, node.x + WIDTH);
      shown.push(node);
    }
    bounds = { width: width || 1, height: Math.max(1, row * (HEIGHT + GAP_Y) - GAP_Y) };
  }

  // ---- drawing ----------------------------------------------------------------------------

  const view = { x: 0, y: 0, scale: 1 };
  let selected = null, found = new Set(), colors = {}, waiting = false, frames = 0;

  function readColors() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["paper", "card", "ink", "soft", "line", "edge", "win", "low", "high", "none", "pick"])
      colors[name] = style.getPropertyValue("--" + name).trim();
    colors.from = parse(colors.low);
    colors.to = parse(colors.high);
  }

  function parse(hex) {
    return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  }

  function share(number) {
    return high > low ? (number - low) / (high - low) : 1;
  }

  function fill(node) {
    if (node.number === null || node.number === undefined) return [colors.none, colors.ink];
    const t = share(node.number);
    const rgb = colors.from.map((from, i) => Math.round(from + t * (colors.to[i] - from)));
    const light = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2];
    return [`rgb(${rgb})`, light > 140 ? "#14181d" : "#ffffff"];
  }

  function draw() {
    waiting = false;
    frames++;
    const ratio = window.devicePixelRatio || 1;
    const width = stage.clientWidth, height = stage.clientHeight;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const { scale } = view;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.setTransform(ratio * scale, 0, 0, ratio * scale, ratio * view.x, ratio * view.y);
    const left = -view.x / scale, top = -view.y / scale;
    const right = left + width / scale, bottom = top + height / scale;

    for (const win of [false, true]) {
      context.beginPath();
      for (const node of shown) {
        if (node.parent === null || winners.has(node.id) !== win) continue;
        const from = nodes[node.parent];
        const x0 = from.x + WIDTH, y0 = from.y + HEIGHT / 2, y1 = node.y + HEIGHT / 2;
        if (node.x < left || x0 > right || Math.max(y0, y1) < top || Math.min(y0, y1) > bottom) continue;
        const middle = (x0 + node.x) / 2;
        context.moveTo(x0, y0);
        context.bezierCurveTo(middle, y0, middle, y1, node.x, y1);
      }
      context.strokeStyle = win ? colors.win : colors.edge;
      context.lineWidth = win ? Math.max(3, 2 / scale) : Math.max(1.2, 0.5 / scale);
      context.stroke();
    }

    for (const node of shown) {
      if (node.x > right || node.x + WIDTH < left || node.y > bottom || node.y + HEIGHT < top) continue;
      drawNode(node, scale);
    }
  }

  function drawNode(node, scale) {
    const wins = winners.has(node.id);
    const [back, ink] = fill(node);
    const dim = node.state === "pruned" || (found.size && !found.has(node.id));
    context.globalAlpha = dim ? 0.35 : 1;
    context.fillStyle = back;
    if (scale < 0.12) {
      // From afar a node is a patch of colour, at least a pixel high.
      if (wins) context.fillStyle = colors.win;
      context.fillRect(node.x, node.y, WIDTH, Math.max(HEIGHT, 1.2 / scale));
      context.globalAlpha = 1;
      if (node === selected) {
        context.strokeStyle = colors.pick;
        context.lineWidth = 2 / scale;
        context.strokeRect(node.x - 3 / scale, node.y - 3 / scale, WIDTH + 6 / scale, HEIGHT + 6 / scale);
      }
      return;
    }
    context.beginPath();
    context.roundRect(node.x, node.y, WIDTH, HEIGHT, 7);
    context.fill();
    if (node.state === "cut") context.setLineDash([5, 4]);
    context.strokeStyle = wins ? colors.win : node.state === "finished" ? colors.ink : colors.edge;
    context.lineWidth = wins ? 3 : 1;
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = 1;
    if (node === selected) {
      context.strokeStyle = colors.pick;
      context.lineWidth = 2 / Math.min(1, scale);
      const gap = 3;
      context.beginPath();
      context.roundRect(node.x - gap, node.y - gap, WIDTH + 2 * gap, HEIGHT + 2 * gap, 9);
      context.stroke();
    }
    context.globalAlpha = dim ? 0.6 : 1;
    if (scale > 0.38) {
      context.fillStyle = dim ? colors.ink : ink;
      context.textBaseline = "middle";
      context.font = "600 11px system-ui, sans-serif";
      context.fillText(cut(node, "head", head(node), WIDTH - 20), node.x + 10, node.y + 15);
      context.font = '12px system-ui, "Noto Sans", "Noto Sans CJK SC", sans-serif';
      context.fillText(cut(node, "body", node.line || "(no text)", WIDTH - 20), node.x + 10, node.y + 32);
    }
    context.globalAlpha = 1;
    if (node.children.length) {
      context.beginPath();
      context.arc(node.x + WIDTH, node.y + HEIGHT / 2, 8, 0, 2 * Math.PI);
      context.fillStyle = node.folded ? colors.ink : colors.card;
      context.fill();
      context.strokeStyle = colors.edge;
      context.lineWidth = 1;
      context.stroke();
      if (node.folded && scale > 0.38) {
        context.fillStyle = colors.soft;
        context.font = "11px system-ui, sans-serif";
        context.fillText("+" + node.below, node.x + WIDTH + 13, node.y + HEIGHT / 2);
      }
    }
  }

  function head(node) {
    const parts = ["#" + node.id, node.kind];
    if (node.number !== null && node.number !== undefined) parts.push(node.number.toFixed(3));
    if (node.visits > 1) parts.push(node.visits + "×");
    parts.push(node.token_ids.length + " tok");
    if (node.answer !== null) parts.push("→ " + oneLine(node.answer));
    return parts.join("  ");
  }

  function cut(node, key, text, room) {
    const name = "cut_" + key;
    if (node[name] === undefined) {
      // Whole characters, not halves of surrogate pairs; at most so many can fit.
      let letters = Array.from(text.slice(0, 120));
      let fits = letters.join("");
      if (fits.length < text.length || context.measureText(fits).width > room) {
        let from = 0, to = letters.length;
        while (from < to) {
          const middle = (from + to + 1) >> 1;
          if (context.measureText(letters.slice(0, middle).join("") + "…").width <= room) from = middle;
          else to = middle - 1;
        }
        fits = letters.slice(0, from).join("") + "…";
      }
      node[name] = fits;
    }
    return node[name];
  }

  function oneLine(text) {
    return text.replace(/\s*\n\s*/g, " ⏎ ").replace(/[\u0000-\u001f\u007f\u202a-\u202e\u2066-\u2069]/g, "�").trim();
  }

  function redraw() {
    if (!waiting) {
      waiting = true;
      requestAnimationFrame(draw);
    }
  }

  // ---- moving -----------------------------------------------------------------------------

  function fit() {
    const room = 24;
    const width = stage.clientWidth - 2 * room;
    const height = stage.clientHeight - 2 * room - document.getElementById("legend").offsetHeight;
    view.scale = Math.max(0.002, Math.min(1.2, width / bounds.width, height / bounds.height));
    view.x = room + Math.max(0, (width - bounds.width * view.scale) / 2);
    view.y = room + Math.max(0, (height - bounds.height * view.scale) / 2);
    redraw();
  }

  function zoom(factor, x, y) {
    const scale = Math.max(0.002, Math.min(4, view.scale * factor));
    view.x = x - (x - view.x) * (scale / view.scale);
    view.y = y - (y - view.y) * (scale / view.scale);
    view.scale = scale;
    redraw();
  }

  function show(node) {
    const x = view.x + node.x * view.scale, y = view.y + node.y * view.scale;
    const width = WIDTH * view.scale, height = HEIGHT * view.scale;
    if (x < 0 || x + width > stage.clientWidth) view.x += stage.clientWidth / 2 - x - width / 2;
    if (y < 0 || y + height > stage.clientHeight) view.y += stage.clientHeight / 2 - y - height / 2;
  }

  function at(x, y) {
    const tx = (x - view.x) / view.scale, ty = (y - view.y) / view.scale;
    for (const node of shown) {
      if (node.children.length && Math.hypot(tx - node.x - WIDTH, ty - node.y - HEIGHT / 2) <= 10)
        return [node, true];
      if (tx >= node.x && tx <= node.x + WIDTH && ty >= node.y && ty <= node.y + HEIGHT)
        return [node, false];
    }
    return [null, false];
  }

  function toggle(node) {
    if (!node.children.length) return;
    const before = { x: node.x, y: node.y };
    node.folded = !node.folded;
    layout();
    // The node stays where it is on the screen.
    view.x += (before.x - node.x) * view.scale;
    view.y += (before.y - node.y) * view.scale;
    redraw();
  }

  const pointers = new Map();
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
    moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const last = pointers.get(event.pointerId);
    if (!last) return;
    const now = [event.offsetX, event.offsetY];
    if (pointers.size === 2) {
      const other = [...pointers.entries()].find(([id]) => id !== event.pointerId)[1];
      const before = Math.hypot(last[0] - other[0], last[1] - other[1]);
      const after = Math.hypot(now[0] - other[0], now[1] - other[1]);
      if (before > 0) zoom(after / before, other[0], other[1]);
      moved += 10;
    } else {
      view.x += now[0] - last[0];
      view.y += now[1] - last[1];
      moved += Math.abs(now[0] - last[0]) + Math.abs(now[1] - last[1]);
      if (moved > 4) canvas.classList.add("drag");
      redraw();
    }
    pointers.set(event.pointerId, now);
  });
  const release = (event) => {
    pointers.delete(event.pointerId);
    canvas.classList.remove("drag");
  };
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerup", (event) => {
    release(event);
    if (moved > 4) return;
    const [node, knob] = at(event.offsetX, event.offsetY);
    if (node && knob) toggle(node);
    else if (node) open(node);
  });
  canvas.addEventListener("dblclick", (event) => {
    const [node, knob] = at(event.offsetX, event.offsetY);
    if (node && !knob) toggle(node);
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 16 : 1;
    zoom(Math.exp(-event.deltaY * lines * 0.0015), event.offsetX, event.offsetY);
  }, { passive: false });

  // ---- the panel --------------------------------------------------------------------------

  let tab = "tokens";

  function element(name, text, attributes = {}) {
    const made = document.createElement(name);
    if (text !== null && text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  function path(node) {
    const found = [];
    for (let step = node; step.parent !== null; step = nodes[step.parent]) found.push(step);
    return found.reverse();
  }

  function open(node, move = false) {
    // What is folded away is opened first.
    let hidden = false;
    for (let step = node; step.parent !== null; step = nodes[step.parent]) {
      hidden ||= nodes[step.parent].folded;
      nodes[step.parent].folded = false;
    }
    if (hidden) layout();
    selected = node;
    if (move || hidden) show(node);
    history.replaceState(null, "", "#" + node.id);
    redraw();
    panel.replaceChildren();

    const title = element("h2", `#${node.id} ${node.kind} `, winners.has(node.id) ? { class: "won" } : {});
    title.append(element("span", node.state, { class: "state " + node.state }));
    panel.append(title);
    if (winners.has(node.id)) panel.append(element("div", "on the winner's path", { class: "won" }));
    if (node.note) panel.append(element("div", node.note, { class: "note", dir: "auto" }));

    const facts = element("dl");
    const fact = (name, value) => {
      if (value === null || value === undefined || value === "") return;
      facts.append(element("dt", name), element("dd", value, { dir: "auto" }));
    };
    const total = node.sampled.reduce((sum, x) => sum + x, 0);
    fact("answer", node.answer);
    fact("score", node.score?.toFixed(4));
    if (node.value !== node.score) fact("value", node.value?.toFixed(4));
    if (node.visits > 1) fact("visits", node.visits);
    fact("tokens", `${node.token_ids.length}` +
      (node.sampled.length === node.token_ids.length ? "" : `, ${node.sampled.length} sampled`));
    if (node.sampled.length)
      fact("log-probability", `${total.toFixed(3)}, mean ${(total / node.sampled.length).toFixed(3)}`);
    fact("ended by", [node.finish_reason, node.stop_reason === null ? "" : JSON.stringify(node.stop_reason)]
      .filter(Boolean).join(" "));
    fact("children", node.children.length || "");
    panel.append(facts);

    panel.append(element("h3", "KV blocks of the path"), strip(node));

    const tabs = element("div", null, { class: "tabs", role: "group", "aria-label": "Text" });
    const names = { tokens: "Tokens", text: "Text", path: "Whole path", prompt: "Prompt" };
    for (const [name, label] of Object.entries(names)) {
      const button = element("button", label, { "aria-pressed": String(tab === name) });
      button.addEventListener("click", () => {
        tab = name;
        open(node);
      });
      tabs.append(button);
    }
    panel.append(tabs, body(node));
  }

  function body(node) {
    if (tab === "tokens") return tokens(node);
    const text = tab === "path" ? path(node).map((step) => step.text).join("")
      : tab === "prompt" ? nodes[0].text : node.text;
    return element("pre", text || "(no text)", { dir: "auto", id: "text" });
  }

  function tokens(node) {
    const box = element("pre", null, { class: "tokens", dir: "auto", id: "text" });
    node.token_ids.forEach((id, i) => {
      const text = node.token_texts[i] ?? "", logprob = node.logprobs[i];
      const span = element("span");
      // A newline is shown as a sign, and made.
      text.split("\n").forEach((part, k) => {
        if (k) span.append(element("i", "⏎"), "\n");
        span.append(part);
      });
      if (logprob === null || logprob === undefined) {
        span.className = "forced";
        span.title = `token ${id}, given`;
      } else {
        const p = Math.exp(logprob);
        span.style.backgroundColor = `rgba(var(--bad), ${(0.75 * Math.min(1, -logprob / 5)).toFixed(3)})`;
        span.title = `token ${id}, log-probability ${logprob.toFixed(3)}, p = ${p.toPrecision(3)}`;
      }
      box.append(span);
    });
    if (!node.token_ids.length) box.append(element("i", "(no tokens)"));
    return box;
  }

  function strip(node) {
    const shared = node.kv_shared_blocks, own = node.kv_private_blocks;
    const box = element("div");
    const label = `${shared} shared, ${own} private`;
    const many = shared + own > 240;
    const row = element("div", null, { class: many ? "strip long" : "strip", role: "img", "aria-label": label });
    if (many) {
      for (const [count, name] of [[shared, ""], [own, "own"]])
        row.append(element("b", null, { class: name, style: `flex: ${count} 0 0; border-radius: 0` }));
    } else {
      for (let i = 0; i < shared + own; i++) row.append(element("b", null, i < shared ? {} : { class: "own" }));
    }
    const key = element("div", null, { class: "note" });
    key.append(element("span", null, { class: "key" }), ` ${shared} shared  `,
      element("span", null, { class: "key own" }), ` ${own} private`);
    box.append(row, key);
    return box;
  }

  // ---- keys, buttons, search --------------------------------------------------------------

  function step(key) {
    if (!selected) return open(nodes[0], true);
    const parent = selected.parent === null ? null : nodes[selected.parent];
    if (key === "ArrowLeft" && parent) open(parent, true);
    if (key === "ArrowRight" && selected.children.length)
      open(selected.children.find((child) => winners.has(child.id)) ?? selected.children[0], true);
    if (key === "ArrowUp" || key === "ArrowDown") {
      const column = shown.filter((node) => node.x === selected.x);
      const next = column[column.indexOf(selected) + (key === "ArrowDown" ? 1 : -1)];
      if (next) open(next, true);
    }
  }

  const middle = () => [stage.clientWidth / 2, stage.clientHeight / 2];
  const actions = {
    0: fit,
    w: () => data.winners.length && open(nodes[data.winners[data.winners.length - 1]], true),
    p: () => {
      for (const node of nodes) node.folded = node.state === "pruned" && node.children.length > 0;
      // A node whose children were all pruned is folded itself.
      for (const node of nodes)
        if (node.children.length && node.children.every((child) => child.state === "pruned")) node.folded = true;
      layout();
      fit();
    },
    e: () => {
      for (const node of nodes) node.folded = false;
      layout();
      fit();
    },
    "+": () => zoom(1.25, ...middle()),
    "=": () => zoom(1.25, ...middle()),
    "-": () => zoom(0.8, ...middle()),
    " ": () => selected && toggle(selected),
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key.startsWith("Arrow")) step(event.key);
    else if (Object.hasOwn(actions, event.key)) actions[event.key]();
    else return;
    event.preventDefault();
  });
  for (const [id, key] of [["fit", "0"], ["winner", "w"], ["fold", "p"], ["unfold", "e"]])
    document.getElementById(id).addEventListener("click", () => actions[key]());

  const find = document.getElementById("find");
  let turn = -1;
  find.addEventListener("input", () => {
    const word = find.value.toLowerCase();
    found = new Set(word ? nodes.filter((n) => n.text.toLowerCase().includes(word)).map((n) => n.id) : []);
    turn = -1;
    summary();
    redraw();
  });
  find.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !found.size) return;
    turn = (turn + 1) % found.size;
    open(nodes[[...found][turn]], true);
  });

  function summary() {
    const sampled = nodes.reduce((sum, node) => sum + node.sampled.length, 0);
    const parts = [`${nodes.length} nodes`, `${sampled} tokens sampled`];
    if (find.value) parts.push(`${found.size} with "${find.value}"`);
    document.getElementById("summary").textContent = parts.join(", ");
  }

  function legend() {
    const box = document.getElementById("legend");
    const ramp = element("span", null);
    if (numbers.length) {
      ramp.append(low.toPrecision(3), element("span", null, { class: "ramp" }), high.toPrecision(3));
    } else ramp.append("no scores");
    box.append(ramp, element("span", "bold: the winner's path", { class: "won" }),
      element("span", "pale: pruned"), element("span", "dashed: cut by the budget"));
  }

  readColors();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColors();
    redraw();
  });
  layout();
  summary();
  legend();
  new ResizeObserver(redraw).observe(stage);
  fit();
  // A large tree opens at its root, readable, rather than whole and too small to read.
  if (view.scale < 0.3 && nodes.length) {
    view.scale = 0.7;
    view.x = 24;
    view.y = stage.clientHeight / 2 - nodes[0].y * view.scale;
  }
  const asked = /^#\d+$/.test(location.hash) ? nodes[Number(location.hash.slice(1))] : null;
  if (asked) open(asked, true);

  // For programs and tests: where a node is on the page, and what is open.
  window.cotrt = {
    open: (id) => open(nodes[id], true),
    fit,
    position: (id) => {
      const box = canvas.getBoundingClientRect(), node = nodes[id];
      return {
        x: box.left + view.x + (node.x + WIDTH / 2) * view.scale,
        y: box.top + view.y + (node.y + HEIGHT / 2) * view.scale,
      };
    },
    knob: (id) => {
      const box = canvas.getBoundingClientRect(), node = nodes[id];
      return {
        x: box.left + view.x + (node.x + WIDTH) * view.scale,
        y: box.top + view.y + (node.y + HEIGHT / 2) * view.scale,
      };
    },
    get selected() { return selected && selected.id; },
    get shown() { return shown.length; },
    get frames() { return frames; },
    get scale() { return view.scale; },
  };
})();
