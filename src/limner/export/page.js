// User interface of the page, and PNG files with the metadata of limner's `drawing.py`.

const $ = (id) => document.getElementById(id);
const GUESS_OPACITY = 0.35, MIN_SAVED_PIXELS = 384;

// ---- PNG files

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let k = 0; k < 8; k++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
  return n;
});

const utf8 = (text) => new TextEncoder().encode(text);
const bytesOf = async (parts) => new Uint8Array(await new Blob(parts).arrayBuffer());

/** Return a chunk of a PNG file: length, type, content and CRC-32. */
async function chunk(type, ...content) {
  const body = await bytesOf([utf8(type), ...content]), ends = new DataView(new ArrayBuffer(8));
  let crc = ~0;
  for (const byte of body) crc = CRC_TABLE[(crc ^ byte) & 255] ^ (crc >>> 8);
  ends.setUint32(0, body.length - 4);
  ends.setUint32(4, ~crc);
  return new Blob([ends.buffer.slice(0, 4), body, ends.buffer.slice(4)]);
}

const internationalText = (key, text) => chunk("iTXt", utf8(`${key}\0\0\0\0\0${text}`));
/** Return Latin-1 text, other text as international text. */
const plainText = (key, text) => /[^\0-\xff]/.test(text) ? internationalText(key, text)
  : chunk("tEXt", Uint8Array.from(`${key}\0${text}`, (c) => c.charCodeAt(0)));

/** Escape control characters: errors.py. */
const escapeControl = (text) =>
  text.replace(/[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufffe\uffff]/g, (c) => {
    const hex = c.charCodeAt(0).toString(16);
    if (/[\s\x1c-\x1f\x85]/.test(c)) return " ";
    return hex.length > 2 ? `\\u${hex.padStart(4, "0")}` : `\\x${hex.padStart(2, "0")}`;
  });

/** Return a number as Python writes a float. */
const float = (x) => (Number.isInteger(x) ? x.toFixed(1) : String(x));

/** Return a PNG file of a drawing, enlarged, with its metadata. */
async function png(config, { caption, seed, settings }, { pixels, candidate, score }) {
  const scale = Math.max(1, Math.ceil(MIN_SAVED_PIXELS / config.size)), side = config.size * scale;
  const raw = new Uint8Array(side * (side * 3 + 1)), area = config.size ** 2;
  for (let y = 0, at = 0; y < side; y++) {
    at++;  // filter 0
    for (let x = 0; x < side; x++) {
      const from = Math.floor(y / scale) * config.size + Math.floor(x / scale);
      for (let color = 0; color < 3; color++) raw[at++] = pixels[color * area + from];
    }
  }
  const header = new DataView(new ArrayBuffer(13));
  header.setUint32(0, side);
  header.setUint32(4, side);
  header.setUint16(8, 0x0802);  // 8 bits, RGB
  const { temperature, top_k, top_p, guidance, follows } = settings, shown = escapeControl(caption);
  const values = {
    seed, candidate, score: score.toFixed(4), model: config.name,
    temperature: float(temperature), top_k, top_p: top_p === null ? null : float(top_p), guidance: float(guidance),
    follows,
  };
  const texts = Object.entries(values).filter(([, value]) => value !== null);
  const escaped = shown.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const compressed = new Blob([raw]).stream().pipeThrough(new CompressionStream("deflate"));
  return new Blob([
    new Uint8Array([137, 80, 78, 71, 13, 10, 26, 10]), await chunk("IHDR", header),
    await internationalText("caption", shown),
    ...await Promise.all(texts.map(([key, value]) => plainText(key, escapeControl(String(value))))),
    await plainText("Software", `limner ${config.limner}`), await internationalText("Description", shown),
    await internationalText("XML:com.adobe.xmp", config.xmp.join(escaped)),
    await chunk("IDAT", await new Response(compressed).arrayBuffer()), await chunk("IEND"),
  ], { type: "image/png" });
}

// ---- Page

let loading = null, busy = false;
const model = () => (loading = loading || Model.load());
const number = (id) => ($(id).value === "" ? null : Number($(id).value));
const fileName = (caption) =>
  caption.toLowerCase().replace(/[^\p{L}\p{N}_]+/gu, "-").replace(/^-|-$/g, "").slice(0, 80) || "drawing";

function element(name, properties, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

function fail(error) {
  const sentence = String(error && error.message || error).replace(/\.?$/, ".");
  Object.assign($("error"), { hidden: false, textContent: sentence[0].toUpperCase() + sentence.slice(1) });
  $("status").textContent = "";
}

/** Show the pictures of unfinished tokens: final cells are solid, guesses faint, other cells empty. */
function preview({ size, grid: [height, width] }, canvases, rows, pictures) {
  rows.forEach(({ candidate, final, last }, r) => {
    const context = canvases[candidate - 1].getContext("2d"), image = context.createImageData(size, size);
    const area = size * size;
    for (let i = 0; i < area; i++) {
      const y = Math.floor(i / size), x = i % size;
      const cell = Math.floor(y * height / size) * width + Math.floor(x * width / size);
      for (let color = 0; color < 3; color++) image.data[i * 4 + color] = pictures[(r * 3 + color) * area + i];
      image.data[i * 4 + 3] = 255 * (cell < final ? 1 : cell <= last ? GUESS_OPACITY : 0);
    }
    context.putImageData(image, 0, 0);
  });
}

/** Show the drawings, best first; those that repeat the tokens of a better one come last. */
async function show(config, request, drawings) {
  const ranked = [...drawings].sort((a, b) => b.score - a.score), seen = new Set();
  const isNew = ranked.map(({ tokens }) => !seen.has(String(tokens)) && seen.add(String(tokens)));
  const order = [...ranked.filter((_, i) => isNew[i]), ...ranked.filter((_, i) => !isNew[i])];
  const figures = await Promise.all(order.map(async (drawing, i) => {
    const { candidate, score } = drawing, { caption, seed } = request;
    const src = URL.createObjectURL(await png(config, request, drawing));
    const picture = element("img", { src, alt: `${caption} (candidate ${candidate}, seed ${seed})` });
    const download = `${fileName(caption)}-seed-${seed}-${candidate}.png`;
    const link = element("a", { href: src, download, textContent: "Download" });
    link.setAttribute("aria-label", `Download candidate ${candidate} as PNG`);
    const rank = drawings.length > 1 ? `${i + 1}. ` : "";
    return element("figure", {}, picture, element("figcaption", {}, `${rank}Score ${score.toFixed(3)} `, link));
  }));
  document.querySelectorAll("#drawings img").forEach((picture) => URL.revokeObjectURL(picture.src));
  $("drawings").replaceChildren(...figures);
  $("drawings").className = drawings.length > 1 ? "ranked" : "one";
}

/** Draw what the form says. */
async function submit() {
  if (busy) return;
  busy = true;
  for (const id of ["draw", "again"]) $(id).setAttribute("aria-disabled", "true");
  $("error").hidden = true;
  $("drawings").setAttribute("aria-busy", "true");
  try {
    await ready;
    if (!$("form").reportValidity()) return;
    const { config } = await model(), request = { caption: $("caption").value.trim(), seed: BigInt($("seed").value) };
    const count = number("candidates"), settings = {};
    for (const id of ["temperature", "top_k", "top_p", "guidance"]) settings[id] = number(id);
    const side = config.size, total = count * config.grid[0] * config.grid[1];
    const canvases = Array.from({ length: count }, () => element("canvas", { width: side, height: side }));
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches, finals = Array(count).fill(0);
    let shown = 0, cost = 0;  // ms
    const onPass = async (rows) => {
      for (const row of rows) finals[row.candidate - 1] = row.final;
      $("progress").value = sum(finals) / total;
      const begin = performance.now();
      if (!still && begin - shown >= 2 * cost) {  // at most a third of the time
        preview(config, canvases, rows, (await (await model()).decode(rows.map((row) => row.tokens))).data);
        shown = performance.now();
        cost = shown - begin;
      }
      await new Promise((resolve) => setTimeout(resolve));  // the browser paints
    };
    $("status").textContent = `Drawing ${count === 1 ? "one picture" : `${count} candidates`} …`;
    $("progress").hidden = false;
    if (!still) {
      $("drawings").replaceChildren(...canvases.map((canvas) => element("figure", {}, canvas)));
      $("drawings").className = count > 1 ? "" : "one";
    }
    const started = performance.now();
    const drawn = await (await model()).draw(request.caption, request.seed, count, settings, onPass);
    await show(config, { ...request, settings: drawn.settings }, drawn.drawings);
    const seconds = ((performance.now() - started) / 1000).toFixed(1), order = count > 1 ? ", best first" : "";
    const { follows } = drawn.settings;
    $("status").textContent = `Drew “${request.caption}”, seed ${request.seed}, in ${seconds} s${order}.`
      + (follows ? ` It follows the training picture “${follows}”.` : "")
      + (drawn.cut ? ` The model read the first ${config.text_len} tokens of the caption.` : "");
  } catch (error) {
    fail(error);
  } finally {
    $("progress").hidden = true;
    $("drawings").removeAttribute("aria-busy");
    for (const id of ["draw", "again"]) $(id).removeAttribute("aria-disabled");
    busy = false;
  }
}

async function start() {
  if (typeof WebAssembly === "undefined" || typeof DecompressionStream === "undefined")
    throw new Error("this browser lacks WebAssembly or DecompressionStream: use one of 2023 or later");
  $("form").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  $("form").addEventListener("invalid", (event) => { (event.target.closest("details") || {}).open = true; }, true);
  $("again").addEventListener("click", () => {
    if (!busy) $("seed").value = String(BigInt($("seed").value.replace(/\D/g, "") || 0) + 1n);
    submit();
  });
  const { config } = await model();
  const { name, about, license, attribution, limner, onnxruntime, sampler } = config;
  $("about").textContent = about || "";
  for (const id of ["temperature", "guidance"]) $(id).value = sampler[id];
  const software = `limner ${limner} (Apache-2.0) and ONNX Runtime Web ${onnxruntime} (MIT, © Microsoft Corporation)`;
  $("license").textContent = `Model: ${name}${license ? `, license ${license}` : ""}. Drawn in this browser, without a `
    + `network, by ${software}. Pictures state that a model drew them.`;
  for (const row of attribution) {
    const credit = ["set", "author", "license", "source"].map((key) => row[key]).filter(Boolean).join(", ");
    const textContent = `${credit || "others"}: ${row.pictures} pictures`;
    $("credits").querySelector("ul").append(element("li", { textContent }));
  }
  $("credits").hidden = !attribution.length;
  if (!busy) $("status").textContent = "Ready: type a caption and press Enter.";
}

/** For scripts: draw without showing. Returns a promise of token ids, and tokens and scores by candidate. */
window.limner = {
  draw: async (caption, seed = 0, candidates = 1, settings = {}) =>
    (await model()).draw(caption, seed, candidates, settings),
};
const ready = start();
ready.catch(fail);
