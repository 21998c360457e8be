"""Gauges of a GPU. No machine of the tests has one, so that NVML's functions are stood in for here, by their documented
signatures; constants, structures and errors are those of nvidia-ml-py."""

from __future__ import annotations

import logging
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sol.engine.types import EngineInfo
from sol.server import gpu_metrics
from sol.server.gpu_metrics import GpuMetrics
from sol.server.metrics import Metrics

UUID = "01234567-89ab-cdef-0123-456789abcdef"
PERIOD = 0.001
GUARD = 60


class FakeNvml:
    """NVML of a machine with one H100, and what it does not have."""

    def __init__(self, *absent: str, prefix: str = "GPU-") -> None:
        self.absent = set(absent)
        self.prefix = prefix
        self.reads = 0
        self.samples = 0
        self.was_read = threading.Condition()
        self.was_shut_down = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if name in self.absent:
            raise AttributeError(name)
        return getattr(pynvml, name)

    def wait_for_reads(self, count: int) -> None:
        """So many more."""
        with self.was_read:
            wanted = self.reads + count
            assert self.was_read.wait_for(lambda: self.reads >= wanted, GUARD)

    def _unless_absent(self, name: str) -> None:
        if name in self.absent:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlInit(self) -> None:
        self._unless_absent("driver")

    def nvmlShutdown(self) -> None:
        self.was_shut_down.set()

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.prefix + UUID:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "handle"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H100"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._unless_absent("utilization")
        return SimpleNamespace(gpu=75, memory=25)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        self._unless_absent("memory")
        return SimpleNamespace(used=3 << 30, total=80 << 30, free=77 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._unless_absent("power")
        return 350_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return 61

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        if kind == pynvml.NVML_CLOCK_MEM:  # the last of a round
            with self.was_read:
                self.reads += 1
                self.was_read.notify_all()
        return {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 2619}[kind]

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:
        self._unless_absent("gpm")
        return SimpleNamespace(isSupportedDevice=1)

    def nvmlGpmSampleAlloc(self) -> Any:
        self.samples += 1
        return pynvml.c_nvmlGpmSample_t()

    def nvmlGpmSampleGet(self, handle: str, sample: Any) -> Any:
        return sample

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.samples -= 1

    def nvmlGpmMetricsGet(self, request: Any) -> Any:
        values = {
            pynvml.NVML_GPM_METRIC_SM_UTIL: 50.0,
            pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: 30.0,
            pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: 90.0,
        }
        assert request.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        for metric in request.metrics[: request.numMetrics]:
            metric.value = values.get(metric.metricId, 0.0)
            known = metric.metricId in values
            metric.nvmlReturn = pynvml.NVML_SUCCESS if known else pynvml.NVML_ERROR_NOT_SUPPORTED
        return request


def use(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def gauges(registry: CollectorRegistry) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in registry.collect():
        for sample in family.samples:
            assert sample.labels == {"model_name": "m", "uuid": sample.labels["uuid"], "gpu": "NVIDIA H100"}
            found[sample.name.removeprefix("sol:gpu_")] = sample.value
    return found


EVERYTHING = {
    "utilization_ratio": 0.75,
    "memory_utilization_ratio": 0.25,
    "memory_used_bytes": float(3 << 30),
    "memory_total_bytes": float(80 << 30),
    "power_watts": 350.5,
    "power_limit_watts": 700.0,
    "temperature_celsius": 61.0,
    "sm_clock_hertz": 1.98e9,
    "memory_clock_hertz": 2.619e9,
    "sm_activity_ratio": 0.5,
    "sm_occupancy_ratio": 0.3,
    "dram_bandwidth_ratio": 0.9,
}
"""Without the activity of tensor cores, which this GPU does not say."""
ACTIVITY = {"sm_activity_ratio", "sm_occupancy_ratio", "dram_bandwidth_ratio"}


def test_everything_that_the_gpu_says(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, registry = FakeNvml(), CollectorRegistry()
    use(monkeypatch, nvml)
    metrics = GpuMetrics(registry, "m", UUID, period_seconds=PERIOD)
    nvml.wait_for_reads(4)
    metrics.close()
    assert nvml.was_shut_down.wait(GUARD)
    assert gauges(registry) == EVERYTHING
    assert nvml.samples == 0  # given back


@pytest.mark.parametrize(
    ("absent", "missing"),
    [
        ("utilization", {"utilization_ratio", "memory_utilization_ratio"}),
        ("power", {"power_watts"}),
        ("gpm", ACTIVITY),  # before Hopper
        ("NVML_GPM_METRIC_ANY_TENSOR_UTIL", ACTIVITY),  # an older nvidia-ml-py
    ],
)
def test_what_a_gpu_does_not_say_is_left_out(monkeypatch: pytest.MonkeyPatch, absent: str, missing: set[str]) -> None:
    nvml, registry = FakeNvml(absent), CollectorRegistry()
    use(monkeypatch, nvml)
    metrics = GpuMetrics(registry, "m", UUID, period_seconds=PERIOD)
    nvml.wait_for_reads(4)
    metrics.close()
    assert gauges(registry).keys() == EVERYTHING.keys() - missing


def test_what_can_no_longer_be_read_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, registry = FakeNvml(), CollectorRegistry()
    use(monkeypatch, nvml)
    metrics = GpuMetrics(registry, "m", UUID, period_seconds=PERIOD)
    nvml.wait_for_reads(4)
    nvml.absent.add("memory")
    nvml.wait_for_reads(4)
    metrics.close()
    assert gauges(registry).keys() == EVERYTHING.keys() - {"memory_used_bytes", "memory_total_bytes"}


def test_nothing_stays_when_reading_ends_for_a_reason_that_nobody_foresaw(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, registry = FakeNvml(), CollectorRegistry()
    use(monkeypatch, nvml)
    metrics = GpuMetrics(registry, "m", UUID, period_seconds=PERIOD)
    nvml.wait_for_reads(2)
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: None  # type: ignore[method-assign]
    assert nvml.was_shut_down.wait(GUARD)
    metrics.close()
    assert gauges(registry) == {}


def test_a_part_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, registry = FakeNvml("utilization", prefix="MIG-"), CollectorRegistry()
    use(monkeypatch, nvml)
    metrics = GpuMetrics(registry, "m", UUID, period_seconds=PERIOD)
    nvml.wait_for_reads(2)
    metrics.close()
    assert {sample.labels["uuid"] for family in registry.collect() for sample in family.samples} == {f"MIG-{UUID}"}


@pytest.mark.parametrize("nvml", [None, FakeNvml("driver"), FakeNvml(prefix="other"), pynvml])
def test_no_package_no_driver_no_such_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, nvml: Any
) -> None:
    """The last one is nvidia-ml-py itself, on a machine that has no driver, or no GPU of this UUID."""
    use(monkeypatch, nvml)
    registry = CollectorRegistry()
    with caplog.at_level(logging.DEBUG, "sol.server.gpu"):
        metrics = GpuMetrics(registry, "m", UUID)
        metrics._thread.join(GUARD)
        metrics.close()
    assert generate_latest(registry) == b""
    assert [record.levelname for record in caplog.records if record.name == "sol.server.gpu"] == ["DEBUG"]


def test_a_driver_that_does_not_return_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    held, release = threading.Event(), threading.Event()

    class Hanging(FakeNvml):
        def nvmlInit(self) -> None:
            held.set()
            release.wait(GUARD)
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    use(monkeypatch, Hanging())
    monkeypatch.setattr(gpu_metrics, "_END_SECONDS", 0.01)
    metrics = GpuMetrics(CollectorRegistry(), "m", UUID)
    try:
        assert held.wait(GUARD)
        metrics.close()
        assert metrics._thread.is_alive()
        assert metrics._thread.daemon
    finally:
        release.set()
        metrics._thread.join(GUARD)


def info(gpu_uuid: str | None) -> EngineInfo:
    return EngineInfo(
        model="m", device="cuda" if gpu_uuid else "cpu", dtype="float16", vocab_size=8, max_model_len=8, max_num_seqs=1,
        max_num_batched_tokens=8, block_size=16, num_blocks=1, weight_bytes=1, kv_cache_bytes=1, load_seconds=0.0,
        gpu_uuid=gpu_uuid,
    )  # fmt: skip


def test_the_server_s_metrics_have_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    use(monkeypatch, nvml)
    metrics = Metrics("m")
    metrics.set_engine(info(None))
    assert b"sol:gpu" not in metrics.render()
    metrics.set_engine(info(UUID))
    metrics.set_engine(info(UUID))  # the engine was started again
    with nvml.was_read:
        assert nvml.was_read.wait_for(lambda: nvml.reads > 0, GUARD)
    metrics.close()
    assert nvml.was_shut_down.wait(GUARD)
    line = f'sol:gpu_temperature_celsius{{gpu="NVIDIA H100",model_name="m",uuid="GPU-{UUID}"}} 61.0'
    assert metrics.render().decode().splitlines().count(line) == 1
