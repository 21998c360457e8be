"""What `sol bench` was asked for, checked as a whole: nothing that was given is without effect."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sol.bench.data import LANGUAGES, TASKS, Data, Listed, built_in
from sol.bench.endpoint import Endpoint
from sol.bench.files import read_conversations, read_trace
from sol.bench.lengths import Lengths
from sol.bench.load import Arrivals, ClosedLoop, Load, at_rate, replay
from sol.bench.metrics import Trim
from sol.bench.run import Limits
from sol.bench.session import Settings
from sol.bench.slo import parse_slo
from sol.bench.synthetic import Synthetic, TraceData, TraceEntry, WordLengths, calibrate
from sol.errors import ConfigError

DEFAULT_CONCURRENCY = 8
DEFAULT_SECONDS = 30.0
DEFAULT_INPUT = "256"
DEFAULT_OUTPUT = "128"
DEFAULT_MAX_TOKENS = 256
"""Of prompts from files that name no limit."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """None means not given. Raises `ConfigError` for combinations in which something would be ignored."""

    concurrency: Sequence[int] | None = None
    rate: Sequence[float] | None = None
    sweep: bool = False
    trace: Path | None = None
    arrivals: Arrivals | None = None
    burst_size: int | None = None
    ramp_to: float | None = None
    trace_speed: float | None = None
    duration: float | None = None
    num_requests: int | None = None
    warmup: float | None = None
    cooldown: float | None = None
    request_timeout: float = 600.0
    drain_timeout: float = 120.0

    dataset: str | None = None
    """`builtin`, `synthetic` or a file."""
    tasks: Sequence[str] | None = None
    languages: Sequence[str] | None = None
    input_tokens: str | None = None
    output_tokens: str | None = None
    prefix_tokens: int | None = None
    num_prefixes: int | None = None
    turns: str | None = None
    turn_delay: float | None = None
    multi_turn: bool = False
    ignore_eos: bool | None = None

    slo: str | None = None
    price_per_hour: float | None = None
    metrics_path: str | None = "/metrics"
    scrape_interval: float = 1.0
    save_text: bool = False
    seed: int = 0

    kind: Literal["concurrency", "rate", "sweep", "trace"] = field(init=False)
    data_kind: Literal["builtin", "synthetic", "file", "trace"] = field(init=False)

    def __post_init__(self) -> None:
        chosen = [name for name in ("concurrency", "rate", "trace") if getattr(self, name) is not None]
        chosen += ["sweep"] if self.sweep else []
        if len(chosen) > 1:
            raise ConfigError(f"give one load, not several: {', '.join(map(_flag, chosen))}", param=chosen[1])
        object.__setattr__(self, "kind", chosen[0] if chosen else "concurrency")
        self._only("rate", self.kind, ("arrivals", "burst_size", "ramp_to"))
        self._only("trace", self.kind, ("trace_speed",))
        if self.burst_size is not None and self.arrivals != "burst":
            raise ConfigError("--burst-size needs --arrivals burst", param="burst_size")
        if self.arrivals == "burst" and self.burst_size is None:
            raise ConfigError("--arrivals burst needs --burst-size", param="burst_size")
        if self.ramp_to is not None and len(self.rate or ()) > 1:
            raise ConfigError("--ramp-to goes with one --rate, not with several", param="ramp_to")
        object.__setattr__(self, "data_kind", self._chosen_data())
        self._only("builtin", self.data_kind, ("tasks", "languages"))
        self._only(
            "synthetic", self.data_kind, ("input_tokens", "prefix_tokens", "num_prefixes", "turns", "turn_delay")
        )
        if self.data_kind == "trace" and self.output_tokens is not None:
            raise ConfigError("--output-tokens has no effect: a trace has its own lengths", param="output_tokens")
        if self.multi_turn and self.data_kind != "file":
            raise ConfigError(
                "--multi-turn is for files of conversations; synthetic ones have --turns", param="multi_turn"
            )
        if self.num_prefixes is not None and self.prefix_tokens is None:
            raise ConfigError("--num-prefixes needs --prefix-tokens", param="num_prefixes")
        if self.turn_delay is not None and self.turns is None:
            raise ConfigError("--turn-delay needs --turns", param="turn_delay")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be a whole number from 0, not {self.seed}", param="seed")
        for name, least in (("warmup", 0.0), ("cooldown", 0.0), ("price_per_hour", 0.0), ("drain_timeout", 0.0),
                            ("request_timeout", 0.001), ("scrape_interval", 0.05)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= least):
                raise ConfigError(f"{name} must be a number of at least {least:g}, not {value}", param=name)

    @property
    def ignores_eos(self) -> bool:
        """Whether answers go on to their length whatever the model says: for lengths that are asked for by number."""
        return self.data_kind in ("synthetic", "trace") if self.ignore_eos is None else self.ignore_eos

    def loads(self, entries: Sequence[TraceEntry]) -> list[Load]:
        """All but a sweep's, which depend on what is measured. `entries` are the trace's."""
        number = self.num_requests
        seconds = self.duration if self.duration is not None or number is not None else DEFAULT_SECONDS
        if self.kind == "concurrency":
            return [
                ClosedLoop(concurrency=one, num_conversations=number, seconds=seconds)
                for one in self.concurrency or (DEFAULT_CONCURRENCY,)
            ]
        if self.kind == "rate":
            assert self.rate is not None
            return [
                at_rate(
                    one,
                    arrivals=self.arrivals or "poisson",
                    final_rate=self.ramp_to,
                    burst_size=self.burst_size or 1,
                    num_conversations=number,
                    seconds=seconds,
                    seed=self.seed,
                )
                for one in self.rate
            ]
        if self.kind == "trace":
            return [
                replay(
                    [entry.timestamp for entry in entries],
                    speed=1.0 if self.trace_speed is None else self.trace_speed,
                    num_conversations=number,
                    seconds=self.duration,
                )
            ]
        return []

    def sweep_seconds(self) -> float | None:
        return self.duration if self.duration is not None or self.num_requests is not None else DEFAULT_SECONDS

    def read_trace(self) -> list[TraceEntry]:
        return [] if self.trace is None else read_trace(self.trace)

    async def data(self, endpoint: Endpoint, entries: list[TraceEntry]) -> Data:
        """Asks the endpoint how long words are, where that matters."""
        output = None if self.output_tokens is None else Lengths.parse(self.output_tokens, "output_tokens")
        if self.data_kind == "builtin":
            return built_in(
                tasks=self.tasks or TASKS, languages=self.languages or LANGUAGES, output_tokens=output, seed=self.seed
            )
        if self.data_kind == "file":
            path = Path(self.dataset or "")
            conversations = read_conversations(path, DEFAULT_MAX_TOKENS, multi_turn=self.multi_turn)
            return Listed(
                conversations,
                seed=self.seed,
                output_tokens=output,
                description={"kind": "file", "path": str(path), "multi_turn": self.multi_turn},
            )
        if self.data_kind == "trace":
            return TraceData(
                entries,
                await calibrate(endpoint),
                seed=self.seed,
                description={"kind": "trace", "path": str(self.trace)},
            )
        self._synthetic(WordLengths())  # what cannot work is said before anything is asked
        return self._synthetic(await calibrate(endpoint))

    def check_data(self) -> None:
        """Raise `ConfigError` for lengths that are none, before the endpoint is asked for anything."""
        if self.data_kind == "synthetic":
            self._synthetic(WordLengths())
        elif self.output_tokens is not None:
            Lengths.parse(self.output_tokens, "output_tokens")

    def settings(self, *, gpus: bool) -> Settings:
        return Settings(
            trim=Trim(warmup=self.warmup, cooldown=self.cooldown),
            limits=Limits(request_seconds=self.request_timeout, drain_seconds=self.drain_timeout),
            slo=None if self.slo is None else parse_slo(self.slo),
            price_per_hour=self.price_per_hour,
            metrics_path=self.metrics_path,
            gpus=gpus,
            scrape_interval=self.scrape_interval,
            keep_text=self.save_text,
        )

    def describe(self) -> Mapping[str, Any]:
        return {
            item.name: str(value) if isinstance(value := getattr(self, item.name), Path) else value
            for item in dataclasses.fields(self)
        }

    def _synthetic(self, lengths: WordLengths) -> Synthetic:
        return Synthetic(
            lengths,
            input_tokens=Lengths.parse(self.input_tokens or DEFAULT_INPUT, "input_tokens"),
            output_tokens=Lengths.parse(self.output_tokens or DEFAULT_OUTPUT, "output_tokens"),
            prefix_tokens=self.prefix_tokens or 0,
            num_prefixes=self.num_prefixes or 1,
            turns=None if self.turns is None else Lengths.parse(self.turns, "turns"),
            turn_delay=self.turn_delay or 0.0,
            seed=self.seed,
        )

    def _chosen_data(self) -> str:
        if self.kind == "trace":
            if self.dataset is not None:
                raise ConfigError("--dataset has no effect: a trace makes its own prompts", param="dataset")
            return "trace"
        synthetic = any(getattr(self, name) is not None for name in ("input_tokens", "prefix_tokens", "turns"))
        if self.dataset in ("builtin", "synthetic"):
            return self.dataset
        if self.dataset is not None:
            return "file"
        return "synthetic" if synthetic else "builtin"

    def _only(self, kind: str, chosen: str, names: Sequence[str]) -> None:
        for name in names:
            if chosen != kind and getattr(self, name) is not None:
                what = {"rate": "--rate", "trace": "--trace"}.get(kind, f"--dataset {kind}")
                raise ConfigError(f"{_flag(name)} has no effect without {what}", param=name)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
