"use strict";
const $ = (id) => document.getElementById(id);
const element = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};
const MAX_HISTORY = 30;  // requests on the page
const BRUSH = 0.09;  // of the side of a picture
let running = null;  // AbortController of the present request
let edited = null;  // { image, data, painted }: the picture to redraw a part of, or to follow
let models = [];  // as the server describes them

const headers = () => ($("key").value ? { Authorization: `Bearer ${$("key").value}` } : {});

async function answer(path, options = {}) {
  const response = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  if (response.status === 401) $("key-row").hidden = false;
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `the server answered with status ${response.status}`);
}

/** Call `handle` with the data of each server-sent event. */
async function readEvents(response, handle) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("");
      if (data && data !== "[DONE]") handle(JSON.parse(data));
      else if (block.startsWith(": ") && !data) say(`Waiting: ${block.slice(2)}`);
    }
  }
}

const model = () => models.find(({ id }) => id === $("model").value);
const follows = () => Boolean(model()?.follows && $("follow").checked);

function say(text) { $("status").textContent = text; }

function fail(error) {
  $("error").hidden = !error;
  const lost = error instanceof TypeError;  // of fetch
  $("error").textContent = lost ? `The connection ended (${error.message}): try again.` : (error?.message ?? "");
}

function figure(caption) {
  const image = element("img", { alt: `${caption}, being drawn` });
  return { image, text: element("figcaption", { textContent: "…" }), caption };
}

function show(shown, event) {
  const { image, text, caption } = shown, source = `data:image/png;base64,${event.b64_json}`;
  image.src = source;
  if (!event.type.endsWith(".completed")) return;
  image.alt = `${caption}: seed ${event.seed}, candidate ${event.candidate}`;
  const edit = element("button", { type: "button", textContent: "Edit", onclick: () => {
    $("upload").value = "";
    startEdit(caption, event.b64_json);
  } });
  const vary = element("button", { type: "button", textContent: "Vary", onclick: () => {
    $("caption").value = caption;
    $("seed").value = String(event.seed + 1);
    leaveEdit();
    $("form").requestSubmit();
  } });
  edit.setAttribute("aria-label", `Edit candidate ${event.candidate}`);
  vary.setAttribute("aria-label", `Vary: draw again with seed ${event.seed + 1}`);
  const name = `${caption.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "drawing"}-${event.seed}-${event.candidate}`;
  const files = [["PNG", source], ...(event.svg ? [["SVG", `data:image/svg+xml,${encodeURIComponent(event.svg)}`]] : [])];
  const links = files.map(([kind, href]) => {
    const link = element("a", { href, download: `${name}.${kind.toLowerCase()}`, textContent: kind });
    link.setAttribute("aria-label", `${kind} of candidate ${event.candidate}`);
    return link;
  });
  const facts = `seed ${event.seed}, candidate ${event.candidate}, score ${event.score.toFixed(3)}`;
  const follows = event.follows ? `, follows “${event.follows}”` : "";
  text.replaceChildren(facts + follows, element("br"), ...links, edit, vary);
}

function addToHistory(caption, n) {
  const shown = Array.from({ length: n }, () => figure(caption));
  const list = element("div", { className: "drawings" }, ...shown.map(({ image, text }) => element("figure", {}, image, text)));
  const entry = element("article", {}, element("h2", { textContent: caption }), list);
  $("history").prepend(entry);
  while ($("history").children.length > MAX_HISTORY) $("history").lastChild.remove();
  return { shown, entry };
}

async function request(caption) {
  const fields = { prompt: caption, model: $("model").value, n: Number($("n").value), stream: true, partial_images: 3, trace: true };
  fields.candidates = Math.max(fields.n, Number($("candidates").value));
  if ($("seed").value) fields.seed = Number($("seed").value);
  const options = { method: "POST", signal: running.signal };
  if (!edited) {
    options.body = JSON.stringify(fields);
    return answer("v1/images/generations", { ...options, headers: { "content-type": "application/json" } });
  }
  const form = new FormData();
  for (const [key, value] of Object.entries(fields)) form.append(key, String(value));
  form.append("image", new Blob([Uint8Array.from(atob(edited.data), (c) => c.charCodeAt(0))], { type: "image/png" }), "image.png");
  if (!follows()) form.append("mask", await maskFile(), "mask.png");
  return answer("v1/images/edits", { ...options, body: form });
}

async function draw(event) {
  event.preventDefault();
  const invalid = [...$("form").elements].find((field) => !field.checkValidity());
  if (invalid) { invalid.reportValidity(); return; }
  const caption = $("caption").value.trim();
  if (running) return say("Press Stop first: one request is drawn at a time.");
  if (!caption) return fail(new Error("The caption is empty: describe the picture."));
  fail(null);
  running = new AbortController();
  $("stop").hidden = false;
  say("Drawing …");
  const { shown, entry } = addToHistory(caption, Number($("n").value));
  let finished = 0;
  try {
    await readEvents(await request(caption), (data) => {
      if (data.error) throw new Error(data.error.message);
      show(shown[data.image_index], data);
      if (data.type.endsWith(".completed")) finished += 1;
      else say("Drawing …");
      for (const warning of data.warnings ?? []) fail(new Error(warning));
    });
    say(`Drew ${finished} of ${shown.length} pictures.`);
  } catch (error) {
    if (!finished) entry.remove();
    say(error.name === "AbortError" ? "Stopped." : "");
    if (error.name !== "AbortError") fail(error);
  } finally {
    running = null;
    $("stop").hidden = true;
  }
}

/** A picture that is opaque where the drawing stays. */
function maskFile() {
  const canvas = $("mask"), side = canvas.width, out = element("canvas", { width: side, height: side });
  const kept = out.getContext("2d"), rows = Math.round((Number($("rows").value) / 100) * side);
  kept.fillRect(0, 0, side, rows || side);
  if (!rows) {
    kept.globalCompositeOperation = "destination-out";
    for (const [x, y] of edited.painted) brush(kept, x, y, side);
  }
  return new Promise((resolve) => out.toBlob(resolve, "image/png"));
}

function brush(context, x, y, side) {
  context.beginPath();
  context.arc(x * side, y * side, BRUSH * side, 0, 2 * Math.PI);
  context.fill();
}

function showMask() {
  const canvas = $("mask"), context = canvas.getContext("2d"), side = canvas.width, rows = Number($("rows").value) / 100;
  context.imageSmoothingEnabled = false;
  context.drawImage(edited.image, 0, 0, side, side);
  context.fillStyle = "#0b6b63aa";
  if (follows()) return;
  if (rows) context.fillRect(0, rows * side, side, side);
  else for (const [x, y] of edited.painted) brush(context, x, y, side);
}

function startEdit(caption, data) {
  const image = element("img", { src: `data:image/png;base64,${data}` });
  image.onload = () => {
    edited = { image, data, painted: [] };
    $("edit").hidden = false;
    $("caption").value = caption;
    $("draw").textContent = "Redraw";
    showMask();
    $("caption").focus();
    $("edit").scrollIntoView({ block: "nearest" });
  };
}

/** Show what the chosen model can do. */
function showModel() {
  $("about").textContent = model()?.about ?? "";
  $("follow-row").hidden = !model()?.follows;
  if (edited) showMask();
}

/** Edit a picture of the disk: its central square, on white. */
function upload() {
  const [file] = $("upload").files, reader = new FileReader(), image = element("img");
  if (!file) return;
  const unusable = () => fail(new Error(`The file ${file.name} is not a picture that this browser reads: choose another one.`));
  image.onerror = reader.onerror = unusable;
  reader.onload = () => { image.src = reader.result; };
  image.onload = () => {
    const side = $("mask").width, canvas = element("canvas", { width: side, height: side });
    const context = canvas.getContext("2d"), { naturalWidth: width, naturalHeight: height } = image;
    const scale = side / Math.min(width || side, height || side), size = [(width || side) * scale, (height || side) * scale];
    context.fillStyle = "white";
    context.fillRect(0, 0, side, side);
    context.drawImage(image, (side - size[0]) / 2, (side - size[1]) / 2, ...size);
    fail(null);
    startEdit($("caption").value, canvas.toDataURL("image/png").split(",")[1]);
  };
  reader.readAsDataURL(file);
}

function leaveEdit() {
  edited = null;
  $("upload").value = "";
  $("edit").hidden = true;
  $("draw").textContent = "Draw";
}

function paint(event) {
  if (!edited || !event.buttons) return;
  const box = $("mask").getBoundingClientRect();
  $("rows").value = "0";
  $("follow").checked = false;
  edited.painted.push([(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height]);
  showMask();
}

async function start() {
  fail(null);
  try {
    models = (await (await answer("v1/models")).json()).data;
    $("model").replaceChildren(...models.map(({ id }) => element("option", { value: id, textContent: id })));
    showModel();
    say("Ready.");
  } catch (error) {
    fail(error);
  }
}

$("form").addEventListener("submit", draw);
$("stop").addEventListener("click", () => running?.abort());
$("key").addEventListener("change", start);
$("leave").addEventListener("click", leaveEdit);
$("model").addEventListener("change", showModel);
$("upload").addEventListener("change", upload);
$("follow").addEventListener("change", showMask);
$("rows").addEventListener("input", () => { $("follow").checked = false; showMask(); });
$("clear").addEventListener("click", () => { edited.painted = []; showMask(); });
for (const kind of ["pointerdown", "pointermove"]) $("mask").addEventListener(kind, paint);
start();
