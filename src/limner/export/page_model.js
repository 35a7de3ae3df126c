// A model in a browser: files in the page, tokenizer and graphs, as in limner's Python packages `text` and `runtime`.
const PAD = -1;

// ---- Files in the page

const NOT_KEPT = { "À": 0, "Á": 10, "Â": 13, "Ã": 60 };  // character codes that HTML does not keep in an element

/** Decompress a file of the page and remove its element, which frees memory. */
async function readFile(name) {
  const element = document.getElementById(name), text = element.textContent;
  element.remove();
  const packed = new Uint8Array(Math.floor(text.length * 7 / 8));
  for (let i = 0, at = 0, bits = 0, count = 0; i < text.length; i++) {
    const code = text.charCodeAt(i);
    bits = (bits << 7 | (code < 128 ? code : NOT_KEPT[text[i]])) & 0x3fff;
    count += 7;
    if (count > 7) packed[at++] = bits >> (count -= 8);
  }
  const gzip = new Blob([packed]).stream();
  const bytes = new Uint8Array(await new Response(gzip.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer());
  if (!name.endsWith(".safetensors")) return bytes;
  const joined = new Uint8Array(bytes.length), odd = Math.ceil(bytes.length / 2);
  for (let i = 0; i < bytes.length; i++) joined[i] = bytes[(i >> 1) + (i & 1) * odd];
  return joined;
}

const readJson = async (name) => JSON.parse(new TextDecoder().decode(await readFile(name)));

// ---- Captions: text/bpe.py

const WORDS = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+/gu;

class Tokenizer {
  constructor(file) {
    this.vocab = new Map(Object.entries(file.model.vocab));
    this.ranks = new Map(file.model.merges.map(([a, b], rank) => [`${a} ${b}`, rank]));
    this.characters = [];  // a printable character for each byte
    for (let byte = 0, other = 256; byte < 256; byte++) {
      const printable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
      this.characters.push(String.fromCharCode(printable ? byte : other++));
    }
  }

  /** Return the token ids of a caption. */
  encode(caption) {
    if (/\p{Surrogate}/u.test(caption)) throw new Error("the caption is not valid Unicode: type it again");
    const lower = Array.from(caption, (c) => c.toLowerCase()).join("").normalize("NFC");
    const text = lower.replace(/\p{White_Space}+/gu, " ").replace(/^ | $/g, "");
    if (!text) throw new Error("the caption is empty: describe the picture");
    return ` ${text}`.match(WORDS).flatMap((word) => this.merge(word));
  }

  /** Merge the bytes of a word, lowest rank first and then leftmost. */
  merge(word) {
    const symbols = Array.from(new TextEncoder().encode(word), (byte) => this.characters[byte]);
    for (;;) {
      let best = Infinity, at = -1;
      for (let i = 0; i + 1 < symbols.length; i++) {
        const rank = this.ranks.get(`${symbols[i]} ${symbols[i + 1]}`);
        if (rank < best) [best, at] = [rank, i];
      }
      if (at < 0) return symbols.map((symbol) => this.vocab.get(symbol));
      symbols.splice(at, 2, symbols[at] + symbols[at + 1]);
    }
  }
}

/** Return token ids, cut or padded. */
const padded = (ids, length) => Array.from({ length }, (_, i) => (i < ids.length ? ids[i] : PAD));

// ---- Graphs: runtime/pipeline.py

/** The prior after a caption, with keys and values of the candidates. */
class Prior {
  constructor(model, { logits, ...prefix }) {
    [this.model, this.logits, this.prefix, this.states] = [model, logits.data, prefix, {}];
  }

  start(rows) {
    for (const { name, shape } of this.model.sessions.step.inputMetadata)
      if (name.startsWith("states_")) {
        const dims = shape.map((size, axis) => (axis === 1 ? rows : size));
        this.states[name] = new this.model.ort.Tensor("float32", new Float32Array(dims.reduce((a, b) => a * b)), dims);
      }
    return () => this.logits;
  }

  async step(tokens, positions) {
    const [rows, w] = [tokens.length, tokens[0].length];
    const position = this.model.integers(positions.map((p) => [p]), 1);
    const inputs = { tokens: this.model.integers(tokens, w), position, ...this.prefix, ...this.states };
    const { logits, ...states } = await this.model.sessions.step.run(inputs);
    for (const name in states) this.states[name.replace("next_", "")] = states[name];
    const size = logits.data.length / (rows * w);
    return (row, i) => logits.data.subarray((row * w + i) * size, (row * w + i + 1) * size);
  }

  /** Drop all but some candidates: the second axis of the states. */
  select(rows) {
    for (const [name, { data, dims: [lanes, count, ...rest] }] of Object.entries(this.states)) {
      const size = rest.reduce((a, b) => a * b), kept = new Float32Array(lanes * rows.length * size);
      for (let lane = 0, at = 0; lane < lanes; lane++)
        for (const row of rows) {
          kept.set(data.subarray((lane * count + row) * size, (lane * count + row + 1) * size), at);
          at += size;
        }
      this.states[name] = new this.model.ort.Tensor("float32", kept, [lanes, rows.length, ...rest]);
    }
  }
}

class Model {
  /** Load the model from the files in the page. */
  static async load() {
    const model = new Model(), script = new Blob([await readFile("ort.mjs")], { type: "text/javascript" });
    model.config = await readJson("config.json");
    model.tokenizer = new Tokenizer(await readJson("tokenizer.json"));
    const [height, width] = model.config.grid, { buffer } = await readFile("examples.bin");
    model.examples = new Examples(new Uint16Array(buffer), await readJson("examples.json"), height * width);
    model.ort = await import(URL.createObjectURL(script));
    Object.assign(model.ort.env.wasm, { numThreads: 1, wasmBinary: await readFile("ort.wasm") });
    model.sessions = {};
    const graphs = { prior: ["prefill", "step"], dvae: ["decode"], contrastive: ["score"] };
    for (const [weights, names] of Object.entries(graphs)) {
      const path = `${weights}.safetensors`, data = await readFile(path);
      for (const name of names) {
        await new Promise((resolve) => setTimeout(resolve));  // the browser paints and reads keys
        model.sessions[name] = await model.ort.InferenceSession.create(await readFile(`${name}.onnx`), {
          executionProviders: ["wasm"], externalData: [{ path, data }], logSeverityLevel: 3,
        });
      }
    }
    return model;
  }

  /** Return integers [M, W] as a tensor. */
  integers(rows, width) {
    const values = BigInt64Array.from(rows.flatMap((row) => Array.from(row, BigInt)));
    return new this.ort.Tensor("int64", values, [rows.length, width]);
  }

  /** Return the pictures of tokens [M, S], uint8 [M, 3, H, W]. Positions without a token repeat the token above. */
  async decode(rows) {
    const width = this.config.grid[1], filled = rows.map((row) => Array.from(row));
    for (const row of filled)
      for (let i = 1; i < row.length; i++) if (row[i] === UNSET) row[i] = row[i - width] ?? row[i - 1];
    return (await this.sessions.decode.run({ tokens: this.integers(filled, filled[0].length) })).pictures;
  }

  /** Return the scores of pictures for the token ids of a caption, [M]. */
  async score(ids, pictures) {
    const { rerank_len } = this.config, text = this.integers([padded(ids, rerank_len)], rerank_len);
    const { data } = (await this.sessions.score.run({ text, pictures })).scores;
    if (!data.every(Number.isFinite)) throw new Error(DAMAGED);
    return data;
  }

  /** Return the row of the example that the prior follows, undefined without one: priming.py, `follow_example`. */
  async example(caption, ids) {
    const rows = this.examples.about(caption);
    if (rows.length < 2) return rows[0];
    const scores = await this.score(ids, await this.decode(rows.map((row) => this.examples.row(row))));
    return rows[scores.indexOf(maximum(scores))];
  }

  /**
   * Draw candidates of a caption. Return its token ids, whether they were cut to the model's length, and, by candidate,
   * tokens, score and pixels [3, H, W].
   * `seed` is a BigInt, a number or a text; `settings` are the sampler's. `onPass(rows)` sees each pass.
   */
  async draw(caption, seed, candidates, settings = {}, onPass = () => {}) {
    const { grid, text_len, window, sampler, prior_score_weight, size, can_follow } = this.config;
    const length = grid[0] * grid[1], merged = { ...sampler, ...settings }, ids = this.tokenizer.encode(caption);
    const text = padded(ids, text_len), followed = can_follow ? await this.example(caption, ids) : undefined;
    const example = followed === undefined ? Array(can_follow ? length : 0).fill(PAD) : this.examples.row(followed);
    const input = [...text, ...example], follows = followed === undefined ? null : this.examples.name(followed);
    const priors = [];
    for (const row of merged.guidance === 1 ? [input] : [input, input.map(() => PAD)])
      priors.push(new Prior(this, await this.sessions.prefill.run({ text: this.integers([row], row.length) })));
    const rows = Array.from({ length: candidates }, (_, i) => ({
      candidate: i + 1, uniform: uniformNumbers(candidateSeed(BigInt(seed), i), length),
      tokens: new Int32Array(length).fill(UNSET), first: 0, final: 0, last: -1, logProbability: 0,
    }));
    await generate(priors, merged, rows, grid[1], window, onPass);
    const pictures = await this.decode(rows.map((row) => row.tokens));
    const scores = await this.score(ids, pictures);
    const drawings = rows.map(({ candidate, tokens, logProbability }, i) => ({
      candidate, tokens: Array.from(tokens), score: scores[i] + prior_score_weight * logProbability / length,
      pixels: pictures.data.subarray(i * 3 * size * size, (i + 1) * 3 * size * size),
    }));
    return { text, cut: ids.length > text_len, settings: { ...merged, follows }, drawings };
  }
}
