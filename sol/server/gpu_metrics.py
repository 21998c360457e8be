"""What NVML says of the GPU that the engine computes on: use, memory, activity of its kernels, power, heat, clocks.

NVML is part of NVIDIA's driver, read through nvidia-ml-py. A thread of its own reads it every few seconds: calls take
microseconds to milliseconds, and a driver in trouble may not return at all. Where there is no driver, no package or no
such GPU there are no gauges, and one line of the debug log says why. A value that a GPU does not have is left out, and
what can no longer be read is taken back: an alarm is to see that it is absent, not its last value.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, Gauge

logger = logging.getLogger("sol.server.gpu")

PERIOD_SECONDS: Final = 5.0
_END_SECONDS: Final = 1.0
"""How long the end of the thread is waited for: it may hang in the driver."""

_MEGAHERTZ: Final = 1e6
_GAUGES: Final = {
    "utilization_ratio": "Share of the last moments in which a kernel ran, however small it was.",
    "memory_utilization_ratio": "Share of the last moments in which the GPU's memory was read or written.",
    "memory_used_bytes": "The GPU's memory in use, by all processes.",
    "memory_total_bytes": "The GPU's memory.",
    "sm_activity_ratio": "Share of the SMs that were busy, over the last seconds (Hopper and later).",
    "sm_occupancy_ratio": "Warps that were active, of those that the SMs could hold (Hopper and later).",
    "tensor_activity_ratio": "Share of time in which tensor cores computed (Hopper and later).",
    "dram_bandwidth_ratio": "Used bandwidth of the GPU's memory, of what it can (Hopper and later).",
    "power_watts": "Power that the GPU draws.",
    "power_limit_watts": "Power at which it slows down.",
    "temperature_celsius": "Of the GPU.",
    "sm_clock_hertz": "Clock of the SMs.",
    "memory_clock_hertz": "Clock of the memory.",
}


class GpuMetrics:
    """Gauges `sol:gpu_*` of one GPU, labelled with `model_name`, `uuid` and `gpu`, its name."""

    def __init__(
        self, registry: CollectorRegistry, model_name: str, uuid: str, *, period_seconds: float = PERIOD_SECONDS
    ) -> None:
        """`uuid`: as CUDA says it, without NVML's prefix. Reading begins at once, in a thread."""
        self._registry = registry
        self._model_name = model_name
        self._uuid = uuid
        self._period = period_seconds
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, unless the driver holds it."""
        self._ending.set()
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:  # no package, no driver, or one that is older than its kernel module
            logger.debug("no metrics of the GPU: %s: %s", type(error).__name__, error)
            return
        try:
            self._read_until_the_end(pynvml)
        except Exception as error:
            logger.debug("no more metrics of the GPU: %s: %s", type(error).__name__, error)
        finally:
            with contextlib.suppress(Exception):
                pynvml.nvmlShutdown()

    def _read_until_the_end(self, nvml: Any) -> None:
        handle, uuid = _find(nvml, self._uuid)
        name = nvml.nvmlDeviceGetName(handle)
        labels = (self._model_name, uuid, name.decode() if isinstance(name, bytes) else name)
        gauges = {
            key: Gauge(f"sol:gpu_{key}", text, ("model_name", "uuid", "gpu"), registry=self._registry)
            for key, text in _GAUGES.items()
        }
        try:
            with contextlib.closing(_Activity(nvml, handle)) as activity:
                while True:
                    values = _read(nvml, handle) | activity.read()
                    for key, gauge in gauges.items():
                        if key in values:
                            gauge.labels(*labels).set(values[key])
                        else:
                            _remove(gauge, labels)
                    if self._ending.wait(self._period):
                        return
        except Exception:
            for gauge in gauges.values():
                _remove(gauge, labels)
            raise


def _remove(gauge: Gauge, labels: tuple[str, ...]) -> None:
    with contextlib.suppress(KeyError):  # it was not there
        gauge.remove(*labels)


def _find(nvml: Any, uuid: str) -> tuple[Any, str]:
    """The GPU of that UUID, or the part of one (MIG). NVML and CUDA count GPUs differently, so numbers would not do."""
    for prefix in ("GPU-", "MIG-"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(prefix + uuid), prefix + uuid
        except nvml.NVMLError:
            continue
    raise LookupError(f"NVML knows no GPU with the UUID {uuid}")


def _read(nvml: Any, handle: Any) -> dict[str, float]:
    """What there is, by the names of gauges."""
    values: dict[str, float] = {}

    def take(read: Callable[[], dict[str, float]]) -> None:
        with contextlib.suppress(nvml.NVMLError):  # this GPU does not have it, or has fallen off the bus
            values.update(read())

    def utilization() -> dict[str, float]:
        rates = nvml.nvmlDeviceGetUtilizationRates(handle)
        return {"utilization_ratio": rates.gpu / 100, "memory_utilization_ratio": rates.memory / 100}

    def memory() -> dict[str, float]:
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
        return {"memory_used_bytes": float(info.used), "memory_total_bytes": float(info.total)}

    take(utilization)
    take(memory)
    take(lambda: {"power_watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1000})
    take(lambda: {"power_limit_watts": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000})
    take(lambda: {"temperature_celsius": float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))})
    take(lambda: {"sm_clock_hertz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * _MEGAHERTZ})
    take(lambda: {"memory_clock_hertz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM) * _MEGAHERTZ})
    return values


class _Activity:
    """NVML's GPU performance monitoring: averages between two samples of counters, which Hopper was the first to have.
    Elsewhere there is nothing to read."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._samples: list[Any] = []
        """The one before, and room for the next."""
        self._has_one = False
        with contextlib.suppress(nvml.NVMLError, AttributeError):  # an older driver, or an older nvidia-ml-py
            if nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                for _ in range(2):
                    self._samples.append(nvml.nvmlGpmSampleAlloc())

    def read(self) -> dict[str, float]:
        """Since the last call; empty at the first one."""
        if len(self._samples) < 2:
            return {}
        nvml = self._nvml
        before, now = self._samples
        try:
            nvml.nvmlGpmSampleGet(self._handle, now)
            found = dict(self._averages(before, now)) if self._has_one else {}
        except (nvml.NVMLError, AttributeError):
            self._has_one = False
            return {}
        self._samples.reverse()
        self._has_one = True
        return found

    def _averages(self, before: Any, now: Any) -> Iterator[tuple[str, float]]:
        nvml = self._nvml
        wanted = {
            "sm_activity_ratio": nvml.NVML_GPM_METRIC_SM_UTIL,
            "sm_occupancy_ratio": nvml.NVML_GPM_METRIC_SM_OCCUPANCY,
            "tensor_activity_ratio": nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
            "dram_bandwidth_ratio": nvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
        }
        request = nvml.c_nvmlGpmMetricsGet_t()
        request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(wanted)
        request.sample1, request.sample2 = before, now
        for index, metric in enumerate(wanted.values()):
            request.metrics[index].metricId = metric
        nvml.nvmlGpmMetricsGet(request)
        for index, key in enumerate(wanted):
            if request.metrics[index].nvmlReturn == nvml.NVML_SUCCESS:
                yield key, request.metrics[index].value / 100

    def close(self) -> None:
        for sample in self._samples:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlGpmSampleFree(sample)
