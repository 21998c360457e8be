"""The OpenAI-compatible HTTP surface over `sol.engine` and `sol.text`.

    app, config                  a whole server: port, engine process, signals; what it is started with
    routes, middleware, errors   the routes, put together; request ids and API keys; error bodies
    state                        what every route reads: phase, engine, tokenizer
    protocol, parsing            the bodies clients send; from bytes to a checked body
    params, prompts              from a body to SamplingParams and to prompt token ids
    generation, streaming        choices through the engine; server-sent events and clients that leave
    chat, completions, tokenize, models, health, metrics, logprobs       the routes and their shapes

The process that runs this never imports torch.
"""
