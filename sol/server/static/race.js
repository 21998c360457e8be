"use strict";
// The race: the same prompt with and without speculation, in turns, and then replayed side by side.

const RACE_SAMPLES = [
  ["Copy with a correction", "Copy this text and correct the spelling:\n\nThe sun is the star at the center of the solar sistem. The sun is a nearly perfect ball of hot plasma. The sun is by far the most importent source of energy for life on Earth. The sun has been an object of veneration in many cultures."],
  ["Continue a list", "Continue this list up to 30:\n\nItem 1: ready\nItem 2: ready\nItem 3: ready\nItem 4: ready\nItem 5: ready"],
  ["Free prose", "Write a short story about a lighthouse keeper who finds a letter."],
];

class Lane {
  constructor(name, title) {
    this.runs = [];
    this.root = make("section", "lane");
    this.root.dataset.lane = name;
    this.clock = make("span", "clock", "–");
    this.bar = make("div", "fill");
    const head = make("div", "lane-head");
    head.append(make("h2", "", title), this.clock);
    const track = make("div", "track");
    track.append(this.bar);
    this.content = make("div", "text");
    this.content.tabIndex = 0; // it scrolls, which keys must be able to do
    this.content.setAttribute("role", "group");
    this.content.setAttribute("aria-label", `${title}: the text`);
    this.footer = make("footer");
    this.root.append(head, track, this.content, this.footer);
  }

  clear() {
    this.content.replaceChildren();
    this.show(0, 0);
  }

  reset() {
    this.runs = [];
    this.clear();
    this.clock.textContent = "–";
    this.footer.replaceChildren();
    delete this.root.dataset.state;
  }

  show(seconds, share) {
    this.clock.textContent = `${decimal(seconds, 2)} s`;
    this.bar.style.width = `${100 * Math.min(1, share)}%`;
  }

  get total() {
    return this.runs.reduce((sum, run) => sum + run.seconds, 0);
  }

  /** After all runs: the mean, each of them, and the first one's numbers. */
  summarise() {
    const [run] = this.runs;
    this.show(this.total / this.runs.length, 1);
    showNumbers(this.footer, run);
    if (this.runs.length > 1) {
      const each = this.runs.map(({ seconds }) => decimal(seconds, 2)).join(" s, ");
      this.footer.append(make("p", "each", `mean of ${each} s`));
    }
  }
}

const lanes = { plain: new Lane("plain", "Plain decoding"), speculative: new Lane("speculative", "With speculation") };

async function race() {
  const fields = requestFields();
  const signal = fields && activity.begin();
  if (!signal) return;
  // All runs need one seed, whatever it is.
  if (fields.seed === undefined) fields.seed = Math.floor(Math.random() * 2 ** 32);
  const wish = fields.speculation && fields.speculation.drafter ? fields.speculation : undefined;
  const body = { ...fields, messages: [{ role: "user", content: $("race-prompt").value }] };
  const key = $("api-key").value;
  $("race-replay").hidden = true;
  showVerdict("", "running");
  for (const lane of Object.values(lanes)) lane.reset();
  try {
    const ahead = { ...body, max_completion_tokens: 1, speculation: { enabled: false } };
    for await (const _ of streamChat(ahead, key, signal));
    const rounds = Number($("rounds").value);
    for (let round = 0; round < rounds; round++) {
      const order = [[lanes.plain, { enabled: false }], [lanes.speculative, wish]];
      if (round % 2) order.reverse();
      for (const [lane, speculation] of order) {
        await runLane(lane, { ...body, speculation }, key, signal);
      }
    }
    for (const lane of Object.values(lanes)) lane.summarise();
    judge();
    $("race-replay").hidden = false;
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches) await replay(signal);
  } catch (error) {
    if (error.name !== "AbortError") showVerdict(explain(error), "failed");
    else if ($("verdict").dataset.state === "running") showVerdict("Stopped before the end: nothing to compare.", "stopped");
  } finally {
    for (const lane of Object.values(lanes)) delete lane.root.dataset.state;
    activity.end();
  }
}

async function runLane(lane, body, key, signal) {
  lane.clear();
  lane.root.dataset.state = "running";
  const answer = new Answer();
  const expected = lane.runs.length ? lane.runs[0].tokens : body.max_completion_tokens;
  for await (const event of streamChat(body, key, signal)) {
    answer.take(event);
    appendSegments(lane.content, event.segments);
    lane.content.scrollTop = lane.content.scrollHeight;
    lane.show(answer.seconds, expected ? answer.tokens / expected : 0);
    showNumbers(lane.footer, answer);
  }
  lane.show(answer.seconds, 1);
  lane.runs.push(answer);
  delete lane.root.dataset.state;
}

/** Compare the texts of all runs, and the times. */
function judge() {
  const runs = [...lanes.plain.runs, ...lanes.speculative.runs];
  const first = runs[0].text;
  const other = runs.find(({ text }) => text !== first);
  const ratio = lanes.plain.total / lanes.speculative.total;
  const speed = `${times(ratio)} the speed of plain decoding`;
  if (other === undefined) {
    showVerdict(`✓ Same text in all ${runs.length} runs`, "same", speed);
  } else {
    let at = 0;
    while (first[at] === other.text[at]) at++;
    showVerdict(`✗ The texts differ from character ${at + 1} on`, "different", speed);
  }
}

function showVerdict(text, state, speed = "") {
  const box = $("verdict");
  $("outcome").hidden = !text;
  box.dataset.state = state;
  box.replaceChildren(make("strong", "", speed), make("span", "", text));
}

/** Both lanes at once, at the times of their first runs. Ends early after `signal`, with the whole texts shown. */
async function replay(signal) {
  const racers = Object.values(lanes).map((lane) => ({ lane, run: lane.runs[0], next: 0, tokens: 0 }));
  for (const { lane } of racers) {
    lane.clear();
    lane.root.dataset.state = "running";
  }
  const began = performance.now();
  for (let going = true; going; ) {
    const elapsed = signal.aborted ? Infinity : await nextFrame(began);
    going = false;
    for (const racer of racers) {
      const { lane, run } = racer;
      while (racer.next < run.chunks.length && run.chunks[racer.next].at - run.startedAt <= elapsed) {
        const { segments } = run.chunks[racer.next++];
        appendSegments(lane.content, segments);
        racer.tokens += segments.reduce((sum, { tokens }) => sum + (tokens === null ? 1 : tokens), 0);
        lane.content.scrollTop = lane.content.scrollHeight;
      }
      const done = elapsed >= 1000 * run.seconds;
      lane.show(Math.min(elapsed / 1000, run.seconds), done ? 1 : racer.tokens / run.tokens);
      if (done) delete lane.root.dataset.state;
      going ||= !done;
    }
  }
  for (const lane of Object.values(lanes)) lane.summarise();
}

/** Milliseconds since `began`, at the next frame; a hidden page has none, so that a timer stands in. */
function nextFrame(began) {
  return new Promise((resolve) => {
    const done = () => resolve(performance.now() - began);
    if (document.hidden) setTimeout(done, 50);
    else requestAnimationFrame(done);
  });
}

function showRaceable() {
  if (hasDrafters()) {
    if ($("verdict").dataset.state === "impossible") showVerdict("", "");
    return;
  }
  $("race-start").disabled = true;
  showVerdict("This server does not speculate: there is nothing to race against.", "impossible");
}

function startRace() {
  $("lanes").append(lanes.plain.root, lanes.speculative.root);
  for (const [name, text] of RACE_SAMPLES) {
    const button = make("button", "", name);
    button.type = "button";
    button.addEventListener("click", () => ($("race-prompt").value = text));
    $("race-samples").append(button);
  }
  $("race-prompt").value = RACE_SAMPLES[0][1];
  $("race-form").addEventListener("submit", (event) => {
    event.preventDefault();
    race();
  });
  $("race-replay").addEventListener("click", async () => {
    const signal = activity.begin();
    if (!signal) return;
    try {
      await replay(signal);
    } finally {
      activity.end();
    }
  });
}
