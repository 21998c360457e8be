"use strict";
// The settings, the connection to the server, and who may talk to it at the moment.

const $ = (id) => document.getElementById(id);

const WITHOUT = "(none)"; // no drafter can have this name: they are identifiers
const RETRY_SECONDS = 3;

let models = [];
let connecting = 0;
let askedForKey = false;

/** Read the models; try again while the server is loading or away. A later call makes an earlier one give up. */
async function connect() {
  const attempt = ++connecting;
  for (;;) {
    try {
      const found = await listModels($("api-key").value);
      if (attempt !== connecting) return;
      models = found;
      showModels();
      if (askedForKey) {
        askedForKey = false;
        openSettings(false);
        $("message").focus();
      }
      return;
    } catch (error) {
      if (attempt !== connecting) return;
      if (error.status === 401) {
        askForKey(error);
        return;
      }
      const message = error instanceof ApiError ? error.message : "The server's answer is not a list of models.";
      showConnection(message, error.status === 503 ? "waiting" : "failed");
      await new Promise((resolve) => setTimeout(resolve, 1000 * (error.retryAfter || RETRY_SECONDS)));
      if (attempt !== connecting) return;
    }
  }
}

function askForKey(error) {
  askedForKey = true;
  const given = $("api-key").value !== "";
  $("key-field").hidden = false;
  showConnection(given ? error.message : "This server asks for an API key.", "failed");
  openSettings(true);
  $("api-key").focus();
}

function showConnection(text, state) {
  $("connection").textContent = text;
  $("connection").dataset.state = $("notice").dataset.state = state;
  $("notice").textContent = state === "ready" ? "" : text;
  document.body.dataset.ready = state === "ready";
  $("send").disabled = $("race-start").disabled = state !== "ready";
  if (state === "ready") showRaceable();
}

function showModels() {
  const chosen = $("model").value;
  $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
  if (models.some(({ id }) => id === chosen)) $("model").value = chosen;
  showModel();
}

/** What the chosen model allows: drafters, the legend, the length. */
function showModel() {
  const model = currentModel();
  const drafters = (model && model.drafters) || [];
  const chosen = $("drafter").value;
  const automatic = new Option(drafters.length ? "whichever pays" : "this server has none", "");
  const off = drafters.length ? [new Option("off: plain decoding", WITHOUT)] : [];
  $("drafter").replaceChildren(automatic, ...drafters.map((name) => new Option(name, name)), ...off);
  if (chosen === WITHOUT || drafters.includes(chosen)) $("drafter").value = chosen;
  $("legend").replaceChildren(...[TARGET, ...drafters].flatMap(legendEntry));
  const length = model && model.max_model_len;
  if (length) $("max-tokens").max = length;
  showConnection(length ? `Ready. Context of ${length} tokens.` : "Ready.", "ready");
}

function legendEntry(origin) {
  const term = make("dt");
  const sample = make("span", "token", origin);
  sample.dataset.origin = origin;
  term.append(sample);
  return [term, make("dd", "", ORIGINS[origin] || "a drafter of this server")];
}

function currentModel() {
  return models.find(({ id }) => id === $("model").value);
}

function hasDrafters() {
  const model = currentModel();
  return Boolean(model && model.drafters && model.drafters.length);
}

/** The settings as fields of a request, or null where one of them cannot be: then the browser says which. */
function requestFields() {
  if (!$("settings-form").checkValidity()) {
    openSettings(true);
    $("settings-form").reportValidity();
    return null;
  }
  const fields = { model: $("model").value, temperature: $("temperature").valueAsNumber };
  if ($("max-tokens").value) fields.max_completion_tokens = $("max-tokens").valueAsNumber;
  if ($("seed").value) fields.seed = $("seed").valueAsNumber;
  const drafter = $("drafter").value;
  if (drafter === WITHOUT) fields.speculation = { enabled: false };
  else if (drafter) fields.speculation = { drafter };
  return fields;
}

function openSettings(open) {
  $("settings").classList.toggle("open", open);
  $("toggle-settings").setAttribute("aria-expanded", String(open));
}

/** What talks to the server now: chat and race would disturb each other, so there is one at a time. */
const activity = {
  controller: null,

  /** An AbortSignal, or null if something else is going on. */
  begin() {
    if (this.controller) return null;
    this.controller = new AbortController();
    this.show();
    return this.controller.signal;
  },

  end() {
    this.controller = null;
    this.show();
  },

  stop() {
    if (this.controller) this.controller.abort();
  },

  /** Exchange the buttons that start for those that stop; the focus goes along. */
  show() {
    const busy = this.controller !== null;
    const focused = document.activeElement;
    $("new-chat").disabled = busy;
    for (const [start, stop] of [["send", "stop"], ["race-start", "race-stop"]]) {
      $(start).hidden = busy;
      $(stop).hidden = !busy;
      if (focused === $(busy ? start : stop)) $(busy ? stop : start).focus();
    }
  },
};

/** The words for what went wrong; asks for the key where that is what is missing. */
function explain(error) {
  if (error instanceof ApiError) {
    if (error.status === 401) askForKey(error);
    return error.message;
  }
  console.error(error);
  return `Something in this page went wrong: ${error.message}`;
}

function announce(text) {
  $("announcer").textContent = text;
}
