"""What a stream says of its tokens, as `stream_options` asks for it: nothing, the sum at its end, or also how far each
choice is, in every chunk of it (vLLM's `continuous_usage_stats`, which load generators count tokens by)."""

from __future__ import annotations

from sol.server.protocol import StreamOptions


class StreamUsage:
    """`at_end` is whether the stream's last chunk holds the usage of all choices."""

    def __init__(self, options: StreamOptions | None) -> None:
        self.at_end = options is not None and bool(options.include_usage)
        self._in_chunks = self.at_end and options is not None and bool(options.continuous_usage_stats)

    def close(self, prompt_tokens: int, completion_tokens: int) -> str:
        """The end of the event that holds one chunk of one choice, which has got so many tokens with it."""
        if not self.at_end:
            return "}]}\n\n"
        if not self._in_chunks:
            return '}],"usage":null}\n\n'
        return (
            f'}}],"usage":{{"prompt_tokens":{prompt_tokens},"completion_tokens":{completion_tokens},'
            f'"total_tokens":{prompt_tokens + completion_tokens}}}}}\n\n'
        )
