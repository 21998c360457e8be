"use strict";
// The conversation.

const CHAT_SAMPLES = [
  ["Explain the sun", "Why does the sun shine? Answer in three sentences."],
  ["Correct a text", "Copy this text and correct the spelling: The sun is the star at the center of the solar sistem. The sun is a nearly perfect ball of hot plasma. The sun is by far the most importent source of energy for life on Earth."],
  ["Write a list", "Write a list of the numbers from one to twenty, one a line, like this:\n1. one\n2. two\n3. three"],
];

const conversation = []; // messages as the API takes them

async function send(text) {
  const fields = requestFields();
  const signal = fields && activity.begin();
  if (!signal) return;
  $("message").value = "";
  fitMessage();
  $("welcome").hidden = true;
  conversation.push({ role: "user", content: text });
  const question = bubble("user", "You");
  question.append(make("div", "text", text));
  const article = bubble("assistant", "Model");
  const content = make("div", "text");
  const footer = make("footer");
  article.append(content, footer);
  article.setAttribute("aria-busy", "true");
  follow(true);

  const answer = new Answer();
  let note = "";
  try {
    for await (const event of streamChat({ ...fields, messages: conversation }, $("api-key").value, signal)) {
      const following = atEnd();
      answer.take(event);
      appendSegments(content, event.segments);
      showNumbers(footer, answer);
      follow(following);
    }
    if (answer.finishReason === "length") note = "Cut off at the maximum of tokens.";
  } catch (error) {
    note = error.name === "AbortError" ? "Stopped." : explain(error);
    article.dataset.state = error.name === "AbortError" ? "stopped" : "failed";
  } finally {
    activity.end();
  }
  if (answer.text || answer.usage) {
    conversation.push({ role: "assistant", content: answer.text });
  } else {
    // Nothing was answered: the question is taken back, so that it can be sent again.
    conversation.pop();
    if (!$("message").value) $("message").value = text;
    fitMessage();
  }
  if (note) article.insertBefore(make("p", "note", note), footer);
  article.setAttribute("aria-busy", "false");
  announce(note || `Answer complete, ${answer.tokens} tokens.`);
  follow(true);
}

function bubble(role, name) {
  const article = make("article", role);
  article.setAttribute("aria-label", name);
  $("log").append(article);
  return article;
}

function newChat() {
  conversation.length = 0;
  for (const article of $("log").querySelectorAll("article")) article.remove();
  $("welcome").hidden = false;
  $("message").focus();
}

function atEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

function follow(following) {
  if (following) $("log").scrollTop = $("log").scrollHeight;
}

/** As tall as its text, up to what the style allows. */
function fitMessage() {
  const box = $("message");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function startChat() {
  for (const [name, text] of CHAT_SAMPLES) {
    const button = make("button", "", name);
    button.type = "button";
    button.addEventListener("click", () => {
      $("message").value = text;
      fitMessage();
      $("message").focus();
    });
    $("chat-samples").append(button);
  }
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("message").value;
    if (text.trim() && document.body.dataset.ready === "true") send(text);
  });
  $("message").addEventListener("input", fitMessage);
  $("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("composer").requestSubmit();
    }
  });
  $("new-chat").addEventListener("click", newChat);
}
