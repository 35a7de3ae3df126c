// Training pictures that the prior follows when a caption names their subject: retrieval.py of limner's Python package.
const MOST = 64;  // pictures of a subject that are compared, and subjects that styles are compared by

const words = (text) => text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) || [];

/** Phrases of rows, and the rows of the longest ones that a text contains. */
class Phrases {
  constructor(phrases) {
    [this.phrases, this.rows, this.longest] = [phrases, new Map(), 0];
    phrases.forEach((phrase, row) => {
      if (!this.rows.has(phrase)) {
        this.rows.set(phrase, []);
        this.longest = Math.max(this.longest, phrase.split(" ").length);
      }
      this.rows.get(phrase).push(row);
    });
  }

  find(text) {
    const parts = words(text);
    for (let length = Math.min(this.longest, parts.length); length > 0; length--) {
      const starts = Array.from({ length: parts.length - length + 1 }, (_, i) => i);
      const phrases = new Set(starts.map((i) => parts.slice(i, i + length).join(" ")));
      const rows = Array.from(phrases).flatMap((phrase) => this.rows.get(phrase) || []);
      if (rows.length) return rows;
    }
    return [];
  }
}

class Examples {
  /** `tokens`: uint16 [M, S]; `subjects`, `styles`: phrases of words in lower case, [M]. */
  constructor(tokens, { subjects, styles }, length) {
    [this.tokens, this.length] = [tokens, length];
    [this.subjects, this.styles] = [new Phrases(subjects), new Phrases(styles)];
  }

  row(row) {
    return this.tokens.subarray(row * this.length, (row + 1) * this.length);
  }

  name(row) {
    return [this.subjects.phrases[row], this.styles.phrases[row]].filter(Boolean).join(", ");
  }

  /** Return the rows of the pictures that a caption asks for, at most 64: of its subject, in the most similar style. */
  about(caption) {
    const [subject, ...style] = caption.split(",");
    const find = (phrases, part) => [phrases.find(part), phrases.find(caption)].find((rows) => rows.length) || [];
    const asked = find(this.styles, style.join(","));
    let rows = find(this.subjects, subject);
    if (rows.length && asked.length) {
      const ofSubject = this.bySubject(asked), styleOf = (row) => this.styles.phrases[row];
      const distances = new Map(rows.map((row) => [styleOf(row), 0]));
      for (const name of distances.keys()) distances.set(name, this.distance(ofSubject, name));
      const least = Math.min(...distances.values());
      rows = rows.filter((row) => distances.get(styleOf(row)) === least);
    }
    const count = Math.min(rows.length, MOST), step = (rows.length - 1) / (count - 1);
    return Array.from({ length: count }, (_, i) => (i + 1 < count ? rows[Math.floor(i * step)] : rows.at(-1)));
  }

  bySubject(rows) {
    return new Map(rows.map((row) => [this.subjects.phrases[row], row]));
  }

  /** Return the share of tokens in which pictures, by subject, differ from those of a style; 1 without common subjects. */
  distance(rows, style) {
    const others = this.bySubject(this.styles.rows.get(style));
    const shared = Array.from(rows.keys()).filter((subject) => others.has(subject)).sort().slice(0, MOST);
    const differences = shared.map((subject) => {
      const theirs = this.row(others.get(subject));
      return this.row(rows.get(subject)).filter((token, i) => token !== theirs[i]).length;
    });
    return shared.length ? sum(differences) / (shared.length * this.length) : 1;
  }
}
