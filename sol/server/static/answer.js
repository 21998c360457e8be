"use strict";
// One answer: its tokens by origin, its times, and how both are shown. Text reaches the page as text nodes only.

const TARGET = "target";

const ORIGINS = {
  target: "the model itself, one token a pass",
  suffix: "the longest match in the text so far",
  ngram: "what followed the same few words before",
  draft_model: "a smaller model",
  early_exit: "the model's own first layers",
};

class Answer {
  constructor() {
    this.startedAt = performance.now();
    this.text = "";
    this.origins = new Map(); // name → tokens
    this.chunks = []; // {segments, at}, for the replay
    this.counted = 0;
    this.firstTokens = 0;
    this.firstAt = null;
    this.lastAt = null;
    this.exact = true; // false: the server does not count tokens, a chunk is taken for one
    this.length = null;
    this.usage = null;
    this.finishReason = null;
  }

  /** Take what `streamChat` yielded. */
  take({ segments, length, finishReason, usage, at }) {
    if (segments.length) {
      for (const segment of segments) {
        if (segment.tokens === null) this.exact = false;
        const tokens = segment.tokens === null ? 1 : segment.tokens;
        this.text += segment.text;
        this.counted += tokens;
        this.origins.set(segment.origin, (this.origins.get(segment.origin) || 0) + tokens);
      }
      this.chunks.push({ segments, at });
      if (this.firstAt === null) {
        this.firstAt = at;
        this.firstTokens = this.counted;
      }
    }
    if (segments.length || finishReason) this.lastAt = at;
    this.length = length || this.length;
    this.finishReason = finishReason || this.finishReason;
    this.usage = usage || this.usage;
  }

  get tokens() {
    return this.usage ? this.usage.completion_tokens : this.counted;
  }

  /** From the request to the last token. */
  get seconds() {
    return this.lastAt === null ? 0 : (this.lastAt - this.startedAt) / 1000;
  }

  /** From the first token on; null while there is nothing to divide. */
  get tokensPerSecond() {
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return this.firstAt === null || seconds <= 0 ? null : (this.tokens - this.firstTokens) / seconds;
  }

  get speculation() {
    return (this.usage && this.usage.speculation) || null;
  }

  /** Mean acceptance length; null while no drafts were verified. */
  get meanAcceptanceLength() {
    return this.speculation ? this.speculation.mean_acceptance_length : this.length;
  }

  /** Tokens / passes. While it streams: a pass gives exactly one token of the target's own. */
  get tokensPerStep() {
    if (this.speculation) return this.speculation.tokens_per_step;
    const passes = this.origins.get(TARGET) || 0;
    return this.exact && passes ? this.counted / passes : null;
  }
}

/** Append segments to a node; neighbours of one origin share a span. */
function appendSegments(node, segments) {
  for (const { text, origin, tokens } of segments) {
    if (!text) continue;
    let span = node.lastChild;
    if (!span || span.dataset.origin !== origin) {
      span = make("span", "token");
      span.dataset.origin = origin;
      node.append(span);
    }
    if (span.firstChild) span.firstChild.appendData(text);
    else span.append(text);
    if (origin !== TARGET) {
      const total = Number(span.dataset.tokens || 0) + (tokens === null ? 1 : tokens);
      span.dataset.tokens = total;
      span.title = `${origin}: ${total} drafted ${total === 1 ? "token" : "tokens"}, accepted`;
    }
  }
}

/** Show an answer's numbers in a footer. */
function showNumbers(footer, answer) {
  const spec = answer.speculation;
  // name, value, explanation
  const numbers = [
    ["tokens", String(answer.tokens)],
    ["tokens/s", decimal(answer.tokensPerSecond, 1), "from the first token on, as this browser saw it"],
    ["MAL", decimal(answer.meanAcceptanceLength, 2), "mean acceptance length: 1 + accepted / steps that drafted"],
    ["tokens/step", decimal(answer.tokensPerStep, 2), "tokens / passes of the model"],
  ];
  if (spec && spec.draft_tokens) {
    numbers.push(["accepted", percent(spec.acceptance_rate), `${spec.accepted_tokens} of ${spec.draft_tokens} drafts`]);
    numbers.push(["speed-up", times(spec.speedup), "over plain decoding, as the engine believes"]);
  }
  const list = make("dl", "numbers");
  for (const [name, value, explanation] of numbers) {
    const item = make("div");
    if (explanation) item.title = explanation;
    item.dataset.number = name;
    item.append(make("dt", "", name), make("dd", "", value));
    list.append(item);
  }
  footer.replaceChildren(list, originBar(answer.origins));
}

/** A bar of the tokens by origin, and the same in words. */
function originBar(origins) {
  const total = [...origins.values()].reduce((sum, tokens) => sum + tokens, 0);
  const bar = make("div", "origin-bar");
  bar.setAttribute("aria-hidden", "true");
  const words = [];
  for (const [origin, tokens] of origins) {
    const part = make("span");
    part.dataset.origin = origin;
    part.style.flexGrow = tokens;
    bar.append(part);
    words.push(`${origin} ${percent(tokens / (total || 1))}`);
  }
  const box = make("div", "origins");
  box.append(bar, make("span", "origin-words", words.join(" · ")));
  return box;
}

function make(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}

function decimal(value, digits) {
  return typeof value === "number" && Number.isFinite(value) ? value.toFixed(digits) : "–";
}

function percent(value) {
  return typeof value === "number" && Number.isFinite(value) ? `${Math.round(value * 100)}%` : "–";
}

function times(value) {
  return typeof value === "number" && Number.isFinite(value) ? `${value.toFixed(2)}×` : "–";
}
