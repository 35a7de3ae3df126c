// Sampling of tokens from the prior: the Python packages `numerics`, `sampling` and `runtime` of limner in JavaScript.
// The same caption, seed and settings give the same tokens. Rounding to fp32 follows numpy: Math.fround, Float32Array.

const UNSET = -1, DAMAGED = "the model's weights are damaged: use another copy";
const MAX_TOKENS = 256, STEP_TOKENS = 30, ACCEPTANCE_RATE = 0.3;  // sampling/window.py

// ---- Random numbers: numerics/seeding.py, and the Mersenne Twister of torch and numpy

/** Return the seed of a candidate, counted from 0. `seed` is a BigInt. */
const candidateSeed = (seed, candidate) =>
  Number((seed * 1_000_003n + (seed >> 32n) * 2_654_435_769n + BigInt(candidate)) % 2n ** 32n);

/** Return uniform numbers in [0, 1), 24 bits each. */
function uniformNumbers(seed, count) {
  const state = new Uint32Array(624), numbers = new Float32Array(count);
  state[0] = seed;
  for (let i = 1; i < 624; i++) state[i] = Math.imul(1812433253, state[i - 1] ^ (state[i - 1] >>> 30)) + i;
  for (let n = 0; n < count; n++) {
    const i = n % 624, x = (state[i] & 0x80000000) | (state[(i + 1) % 624] & 0x7fffffff);
    let y = state[i] = state[(i + 397) % 624] ^ (x >>> 1) ^ (x & 1 ? 0x9908b0df : 0);
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    numbers[n] = ((y ^ (y >>> 18)) & 0xffffff) * 2 ** -24;
  }
  return numbers;
}

// ---- Sampling: runtime/sampling.py

function maximum(values) {
  let top = -Infinity;
  for (let i = 0; i < values.length; i++) top = Math.max(top, values[i]);
  return top;
}

function sum(values) {
  let total = 0;
  for (let i = 0; i < values.length; i++) total += values[i];
  return total;
}

/** Return exp(x - maximum) of logits in fp32. */
function exponentials(logits) {
  const top = maximum(logits), values = new Float32Array(logits.length);
  for (let i = 0; i < logits.length; i++) values[i] = Math.exp(Math.fround(logits[i] - top));
  return values;
}

/** Sample a token from logits [V] by a uniform number. */
function sampleToken({ temperature, top_k, top_p }, logits, uniform) {
  if (temperature === 0) return logits.indexOf(maximum(logits));
  const scaled = temperature === 1 ? logits : logits.map((x) => x / Math.fround(temperature));
  let p = exponentials(scaled);
  const total = Math.fround(sum(p));
  for (let i = 0; i < p.length; i++) p[i] /= total;
  if (top_k !== null || top_p !== null) p = truncated(p, top_k, top_p);
  const cdf = new Float32Array(p.length);
  for (let i = 0, mass = 0; i < p.length; i++) cdf[i] = mass += p[i];
  const below = cdf.slice(-1);
  new Uint32Array(below.buffer)[0]--;  // the next smaller number, so that the target is below the last despite rounding
  const target = Math.min(Math.fround(uniform * cdf[cdf.length - 1]), below[0]);
  const token = cdf.findIndex((x) => x > target);
  return token < 0 ? cdf.length - 1 : token;
}

/** Set unlikely tokens of p [V] to 0: all but the top_k likeliest, and of these the share top_p. */
function truncated(p, top_k, top_p) {
  const order = Array.from(p.keys()).sort((a, b) => p[b] - p[a]).slice(0, top_k ?? p.length);
  const limit = Math.fround(Math.fround(top_p ?? 2) * Math.fround(sum(order.map((i) => p[i]))));
  const kept = new Float32Array(p.length);
  let before = 0;
  order.forEach((i, n) => {
    if (n === 0 || before < limit) kept[i] = p[i];
    before = Math.fround(before + p[i]);
  });
  return kept;
}

const logProbability = (logits, token) => logits[token] - maximum(logits) - Math.log(sum(exponentials(logits)));

/** The number of tokens that a step reads, chosen by the guesses that were right so far: sampling/window.py. */
class TokenWindow {
  constructor(rows, limit) {
    this.size = Math.max(1, Math.min(limit, Math.floor(MAX_TOKENS / rows)));
    this.sizes = [...[1, 2, 4, 8].filter((w) => w < this.size), this.size];
    this.gains = [...this.sizes];
  }

  update(gained, window, rows) {
    if (!gained.length || this.sizes.length === 1) return;
    const mean = (w) => sum(gained.map((g) => Math.min(g, w))) / gained.length;
    const means = this.sizes.filter((w) => w <= window).map(mean);
    means.push(means[means.length - 1] * (1 + gained.filter((g) => g === window).length / gained.length));
    this.gains = this.gains.map((gain, i) => (i < means.length ? gain + ACCEPTANCE_RATE * (means[i] - gain) : gain));
    const pace = this.gains.map((gain, i) => gain / (STEP_TOKENS + rows * this.sizes[i]));
    this.size = this.sizes[pace.indexOf(maximum(pace))];
  }
}

/**
 * Sample the tokens of candidates, rows of { uniform, tokens, first, final, last, logProbability }.
 * The prior's first logits predict position `first`; tokens before `final` are final, those up to `last` are guesses.
 * `priors` has read the caption, and with guidance also no caption. `onPass(rows)` is awaited after each pass.
 */
async function generate(priors, settings, rows, width, maxWindow, onPass) {
  const length = rows[0].tokens.length, guidance = Math.fround(settings.guidance);
  const window = new TokenWindow(rows.length * priors.length, Math.min(maxWindow, length - 1));
  let logits = priors.map((prior) => prior.start(rows.length));  // functions (row, i) -> logits [V]
  for (let w = 1; ;) {
    const gained = rows.map((row, r) => {
      let agree = true, fresh = 0, accepted = 0;
      for (let i = 0; i < w; i++) {
        const at = row.first + i, guess = row.tokens[at], given = logits.map((of) => of(r, i));
        const [own, empty] = given;
        const guided = empty ? own.map((x, k) => empty[k] + Math.fround(guidance * Math.fround(x - empty[k]))) : own;
        if (agree && !Number.isFinite(sum(guided))) throw new Error(DAMAGED);
        if (at >= row.final) {
          row.tokens[at] = sampleToken(settings, guided, row.uniform[at]);
          if (agree) row.logProbability += logProbability(own, row.tokens[at]);
          fresh += agree;
        }
        accepted += agree;
        agree = agree && row.tokens[at] === guess;
      }
      row.final = row.first + accepted;
      row.last = row.first + w - 1;
      return fresh;
    });
    window.update(gained.filter((fresh) => fresh > 0), w, rows.length * priors.length);
    await onPass(rows);
    const kept = Array.from(rows.keys()).filter((r) => rows[r].final < length);
    if (!kept.length) return;
    if (kept.length < rows.length) priors.forEach((prior) => prior.select(kept));
    rows = kept.map((r) => rows[r]);
    w = window.size;
    const guesses = rows.map((row) => {
      const begin = Math.min(row.final - 1, length - 1 - w);
      for (let at = begin; at < begin + w; at++) {  // the token above, in the last row that has tokens
        const above = Math.max(Math.floor((at - row.last - 1) / width) + 1, 0);
        row.tokens[at] = row.tokens[Math.max(at - above * width, 0)];
      }
      row.first = begin + 1;
      return row.tokens.subarray(begin, begin + w);
    });
    logits = [];
    for (const prior of priors) logits.push(await prior.step(guesses, rows.map((row) => row.first - 1)));
  }
}
