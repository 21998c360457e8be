"use strict";
// The server's API as this page uses it: the models, and answers streamed as server-sent events.

/** The server's root, wherever a proxy put it: this page is its `/`. */
const ROOT = location.pathname.endsWith("/") ? location.pathname : location.pathname + "/";

/** What the server, or the way to it, said no with. `status` is 0 where no answer came. */
class ApiError extends Error {
  constructor(message, status, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** A response with a 2xx status; everything else throws an ApiError (or an AbortError, after `signal`). */
async function request(path, key, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(ROOT + path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0);
  }
  if (response.ok) return response;
  let message = "";
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not the server's own words: a proxy's page, for instance.
  }
  const wait = Number(response.headers.get("retry-after"));
  throw new ApiError(message || `The server answered with status ${response.status}.`, response.status, wait || null);
}

/** [{id, max_model_len, drafters}] */
async function listModels(key) {
  return (await (await request("v1/models", key)).json()).data;
}

/**
 * Stream a chat answer. Yields {segments, length, finishReason, usage, at}: `length` is the mean acceptance length so
 * far, `at` performance.now() when it came; `segments` may be empty, `length`, `finishReason` and `usage` null. A segment
 * is {text, origin, tokens}, with null for `tokens` where the server does not say.
 * Ends when the server says that the answer is complete; throws an ApiError if it ends before that.
 */
async function* streamChat(body, key, signal) {
  const response = await request("v1/chat/completions", key, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      ...body,
      stream: true,
      stream_options: { include_usage: true, include_speculation: true },
    }),
    signal,
  });
  for await (const data of events(response.body)) {
    const at = performance.now();
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message || "The server ended the answer.", response.status);
    const choice = chunk.choices && chunk.choices[0];
    const text = choice && choice.delta && choice.delta.content;
    const speculation = (choice && choice.speculation) || {};
    const segments = speculation.segments || (text ? [{ text, origin: "target", tokens: null }] : []);
    const length = speculation.mean_acceptance_length || null;
    const finishReason = (choice && choice.finish_reason) || null;
    const usage = chunk.usage || null;
    if (segments.length || finishReason || usage) yield { segments, length, finishReason, usage, at };
  }
  throw new ApiError("The connection ended before the answer was complete.", response.status);
}

/** The data of each server-sent event of a body. Leaving the loop cancels the request. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += value;
      let end;
      while ((end = buffer.indexOf("\n\n")) >= 0) {
        const lines = buffer.slice(0, end).split("\n");
        buffer = buffer.slice(end + 2);
        const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection to the server broke.", 0);
  } finally {
    reader.cancel().catch(() => {});
  }
}
