"""HTTP/1.1 to engines, as thin as it can be: `connection` is an asyncio protocol on llhttp's parser, `pool` keeps
connections and opens new ones, `head` writes and checks header lines, `errors` says what can go wrong.

A general client spends more on each request than all of the gateway's stages together: objects for URLs, headers,
cookies, redirections, tracing and timers, none of which an engine needs. Here a request is two pieces of bytes, and an
answer's body is what the parser hands over, in one wake-up for each reading of the socket.

No redirections (they would send an engine's credentials elsewhere), proxies, cookies or compression; GET and POST
alone.
"""
