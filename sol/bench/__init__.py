"""Measuring any OpenAI-compatible endpoint: `sol bench`, and the core of the tools that compare and tune.

    endpoint = await prepare(Endpoint(url="http://127.0.0.1:8000"))
    stage = await measure(endpoint, at_rate(5, seconds=60), built_in())
    summary = summarise(stage, slo=parse_slo("ttft_p95<500ms,tpot_p95<30ms"))

One way: `load` says when, `data` says what, `run` (over `endpoint`, `http`, `stream`) does it and leaves `records`;
`tokens`, `statistics`, `metrics`, `client`, `scrape`, `slo` make figures of them; `session` runs several loads,
`result` and `report` write them down.
"""

from sol.bench.data import Conversation, Data, Listed, Turn, built_in
from sol.bench.endpoint import Endpoint, prepare
from sol.bench.lengths import Lengths
from sol.bench.load import ClosedLoop, Load, OpenLoop, at_rate, replay
from sol.bench.metrics import Summary, Trim, summarise
from sol.bench.records import RequestRecord, Stage
from sol.bench.run import Limits, Stop, Tally, measure
from sol.bench.slo import Slo, parse_slo
from sol.bench.synthetic import Synthetic, TraceData, calibrate

__all__ = [
    "ClosedLoop", "Conversation", "Data", "Endpoint", "Lengths", "Limits", "Listed", "Load", "OpenLoop",
    "RequestRecord", "Slo", "Stage", "Stop", "Summary", "Synthetic", "Tally", "TraceData", "Trim", "Turn", "at_rate",
    "built_in", "calibrate", "measure", "parse_slo", "prepare", "replay", "summarise",
]  # fmt: skip
