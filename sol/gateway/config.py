"""gateway.yaml: every section's model, composed into one, and the file read into it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator

from sol.engines.drivers import DRIVERS
from sol.engines.spec import engine_spec
from sol.errors import ConfigError
from sol.gateway.degradation.config import Step
from sol.gateway.filters.config import Filters
from sol.gateway.limits.config import DatabaseOptions, LimitsConfig, Price
from sol.gateway.observe.config import ObserveConfig
from sol.gateway.queue.config import CLASSES, ClassesConfig, QueueConfig
from sol.gateway.relay.config import RelayConfig
from sol.gateway.routing.config import RoutingConfig
from sol.gateway.section import Expanded, Section
from sol.gateway.sla.config import SlaConfig
from sol.gateway.upstream.head import check_header

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\s]+$")]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
Driver = Literal["sol", "vllm", "sglang", "tgi", "tensorrt-llm", "llama.cpp", "openai"]


class ServerOptions(Section):
    """Where the gateway listens, and how it stops."""

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8080, ge=0, le=65535)
    max_body_bytes: int = Field(default=32 * 2**20, ge=1024)
    drain_seconds: Seconds = 600.0
    """How long admitted requests may go on after SIGTERM; new ones get 503 meanwhile."""


class EngineEntry(Section):
    """One server that answers."""

    name: Name
    url: Expanded | None = None
    """Without /v1; None only for an engine that `sol up` starts from `spec`."""
    driver: Driver = "openai"
    spec: dict[str, Any] | None = None
    api_key: Expanded | None = Field(default=None, repr=False)
    """Sent to the engine as `Authorization: Bearer …`; what clients send never reaches it."""
    headers: dict[str, Expanded] = Field(default_factory=dict, repr=False)
    served_name: Name | None = None
    """What the engine calls its model, where that is not what clients call it."""
    health_path: Annotated[str, Field(pattern="^/")] | None = None
    """Where it says whether it is well; None: the driver's, and of an `openai` endpoint, which has no such route, what
    becomes of requests."""
    metrics_path: Annotated[str, Field(pattern="^/")] | None = None
    """Where it says how busy it is; None: the driver's."""
    max_in_flight: Annotated[int, Field(ge=1)] | None = None
    """Requests that it gets at once; None: as many as come."""

    @field_validator("url")
    @classmethod
    def _a_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            parts = urlsplit(url)
            sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            (parts.hostname or "").encode("idna")
        except ValueError:  # a port that is no number, a label that is too long
            sound = False
        if not sound or parts.query or parts.fragment:
            raise ValueError("must be a URL like http://127.0.0.1:8000")
        url = url.rstrip("/")
        if url.endswith("/v1"):
            raise ValueError("is the server's address, without /v1 at the end")
        return url

    @field_validator("spec")
    @classmethod
    def _a_spec(cls, spec: dict[str, Any] | None) -> dict[str, Any] | None:
        if spec is not None:
            try:
                engine_spec(spec, "")
            except ConfigError as error:
                raise ValueError(error.message) from None
        return spec

    @model_validator(mode="after")
    def _is_somewhere(self) -> Self:
        if self.url is None and self.spec is None:
            raise ValueError("needs a url, or a spec for `sol up` to start it from")
        return self

    @model_validator(mode="after")
    def _headers_are_some(self) -> Self:
        for name, value in self.headers.items():
            check_header(name, value)
        if self.api_key is not None:
            try:
                check_header("authorization", f"Bearer {self.api_key}")
            except ValueError:
                raise ValueError("api_key has a control character, or spaces around it; remove them") from None
        return self


class ModelEntry(Section):
    """What clients may ask for."""

    name: Name
    aliases: tuple[Name, ...] = ()
    engines: tuple[Name, ...] = Field(min_length=1)
    """By their names; all must give the same answers, since any of them may be asked."""


class KeyEntry(Section):
    """One API key, by its hash, by a variable of the environment, or in clear where somebody wants that."""

    key_sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    key_env: Annotated[str, Field(min_length=1)] | None = None
    key: Expanded | None = Field(default=None, repr=False)
    id: Name | None = None
    """In logs and records; None: the beginning of the key's hash."""
    tenant: Name = "default"
    models: frozenset[Name] | None = None
    classes: tuple[Name, ...] = ()
    default_class: Name | None = None
    limits: Name | None = None
    metadata: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        if sum(value is not None for value in (self.key_sha256, self.key_env, self.key)) != 1:
            raise ValueError("needs one of key_sha256, key_env and key")
        return self


class GatewayConfig(Section):
    """The whole file."""

    server: ServerOptions = Field(default_factory=ServerOptions)
    models: tuple[ModelEntry, ...] = Field(min_length=1)
    engines: tuple[EngineEntry, ...] = Field(min_length=1)
    relay: RelayConfig = Field(default_factory=RelayConfig)
    routing: RoutingConfig = Field(default_factory=RoutingConfig)
    keys: tuple[KeyEntry, ...] = ()
    """Any of these opens the API, and those in the database; none of either: it is open to all who reach the port."""
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    prices: dict[Name, Price] = Field(default_factory=dict)
    """By model."""
    database: DatabaseOptions | None = None
    filters: Filters = ()
    observe: ObserveConfig = Field(default_factory=ObserveConfig)
    classes: ClassesConfig = Field(default_factory=ClassesConfig)
    queue: QueueConfig = Field(default_factory=QueueConfig)
    sla: SlaConfig = Field(default_factory=SlaConfig)
    degradation: tuple[Step, ...] = ()
    """The gentlest step first."""

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        _once("engines", (engine.name for engine in self.engines))
        _once("models", (name for model in self.models for name in (model.name, *model.aliases)))
        engines = {engine.name for engine in self.engines}
        models = {model.name for model in self.models}
        for model in self.models:
            _once(f"models: {model.name}: engines", model.engines)
            for name in model.engines:
                if name not in engines:
                    raise ValueError(f"models: {model.name}: engines: there is no engine {name!r}; {_known(engines)}")
        for task in self.routing.tasks:
            for name in task.engines:
                if name not in engines:
                    raise ValueError(f"routing.tasks: {task.name}: there is no engine {name!r}; {_known(engines)}")
            for name in (name for rule in task.when for name in rule.models):
                if name not in models:
                    raise ValueError(f"routing.tasks: {task.name}: there is no model {name!r}; {_known(models)}")
        for name in sorted({*self.prices, *self.limits.model_names}):
            if name not in models:
                raise ValueError(f"prices and limits: there is no model {name!r}; {_known(models)}")
        for key in self.keys:
            self.limits.check_policy(key.limits, "keys: limits")
            for name in sorted(key.models or ()):
                if name not in models:
                    raise ValueError(f"keys: models: there is no model {name!r}; {_known(models)}")
            for name in (*key.classes, *((key.default_class,) if key.default_class is not None else ())):
                if name not in CLASSES:
                    raise ValueError(f"keys: classes: there is no class {name!r}; {_known(CLASSES)}")
        for level in self.sla.levels:
            if level.model is not None and level.model not in models:
                raise ValueError(f"sla.levels: there is no model {level.model!r}; {_known(models)}")
        speculates = any(engine.driver == "sol" for engine in self.engines)
        for step in self.degradation:
            for name in (*step.models, *((step.to,) if step.to is not None else ())):
                if name not in models:
                    raise ValueError(f"degradation: {step.action}: there is no model {name!r}; {_known(models)}")
            if step.action == "drafts_off" and not speculates:
                raise ValueError("degradation: drafts_off: there is no engine with the driver sol; remove this step")
        return self

    @model_validator(mode="after")
    def _nothing_is_without_effect(self) -> Self:
        for engine in self.engines:
            if engine.metrics_path is not None and not DRIVERS[engine.driver].metric_names.is_any:
                raise ValueError(
                    f"engines: {engine.name}: metrics_path: of the driver {engine.driver} no metric's name is known; "
                    "name the engine's own driver, or leave it out"
                )
        if not self.queue.enabled:
            if any(level.deadline is not None for level in self.sla.levels):
                raise ValueError("sla.levels: deadline is kept by the queue; leave it out, or queue.enabled: false")
            for name in CLASSES:
                if self.classes.of(name).preempt != "never":
                    raise ValueError(f"classes: {name}: preempt needs the queue; leave out queue.enabled: false")
        known = self._known_signals()
        for step in self.degradation:
            asked = step.when.signals()
            if not asked & known:
                raise ValueError(
                    f"degradation: {step.action}: when: nobody will ever know {' or '.join(sorted(asked))} "
                    "here (burn_rate needs sla.levels, wait_seconds the queue, utilisation the queue or max_in_flight, "
                    f"kv_usage engines that say it), so the step would never be taken; {_known(known)}"
                )
        return self

    def _known_signals(self) -> frozenset[str]:
        """What degradation can be told here."""
        found = {
            "burn_rate": any(level.has_objectives for level in self.sla.levels),
            "wait_seconds": self.queue.enabled,
            "utilisation": self.queue.enabled or any(engine.max_in_flight is not None for engine in self.engines),
            "kv_usage": any(DRIVERS[engine.driver].metric_names.kv_usage for engine in self.engines),
        }
        return frozenset(name for name, holds in found.items() if holds)


def _once(what: str, names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{what}: {twice[0]!r} is there twice; names must differ")


def _known(names: Iterable[str]) -> str:
    return f"there are {', '.join(sorted(names))}"


def read_config(path: Path, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> GatewayConfig:
    """The configuration in a YAML file, with options of some sections replaced.

    Raises `ConfigError` that names the place in the file, what is wrong, and what would be right.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", param="config") from None
    return parse_config(text, str(path), overrides)


def parse_config(
    text: str, source: str = "gateway.yaml", overrides: Mapping[str, Mapping[str, Any]] | None = None
) -> GatewayConfig:
    """The same, from the file's text."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Of two equal keys YAML's loader takes the last without a word: half of what somebody wrote."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            seen = set()
            for key_node, _ in node.value:
                if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key_node.value!r} is there twice", key_node.start_mark
                    )
                if isinstance(key_node.value, str):
                    seen.add(key_node.value)
            mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
            return mapping

    try:
        data = yaml.load(text, Loader)  # noqa: S506  (it is a SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not YAML: {error}", param="config") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must hold sections, at least models and engines", param="config")
    for name, values in (overrides or {}).items():
        section = data.get(name)
        data[name] = {**section, **values} if isinstance(section, dict) else values if section is None else section
    return make_config(data, source)


def make_config(data: Mapping[Any, Any], source: str = "gateway.yaml") -> GatewayConfig:
    """The same, from what the file holds."""
    try:
        return GatewayConfig.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        # A list whose entries are wrong is also too short: said once is enough.
        details = [item for item in details if item["type"] != "too_short"] or details
        lines = [f"{place}: {text}" if place else text for place, text in (_explain(item, data) for item in details)]
        first = _explain(details[0], data)[0] or "config"
        shown = "\n  ".join(lines[:5]) + (f"\n  and {len(lines) - 5} more" if len(lines) > 5 else "")
        raise ConfigError(f"{source}: {shown}", param=first) from None


_PLAIN = {"extra_forbidden": "there is no such option; remove it, or correct its name", "missing": "is missing"}


def _explain(item: Mapping[str, Any], data: Mapping[Any, Any]) -> tuple[str, str]:
    """Where an error is, in the words of the file, and what it is. Values of secrets are not repeated."""
    place, value = "", data
    for part in item["loc"]:
        if isinstance(part, int):
            try:
                value = value[part]
            except (TypeError, LookupError):
                value = {}
            name = value.get("name") if isinstance(value, dict) else None
            place += f"[{name if isinstance(name, str) else part}]"
        elif not isinstance(value, dict) or part in value or item["type"] == "missing":
            place += f".{part}" if place else str(part)
            value = value.get(part, {}) if isinstance(value, dict) else {}
    text = _PLAIN.get(item["type"], item["msg"].removeprefix("Value error, "))
    if item["type"] not in _PLAIN and not place.endswith(("key", "url")) and isinstance(item["input"], (int, float)):
        text += f", not {item['input']!r}"
    elif item["type"] not in _PLAIN and place.endswith(("driver", "name", "port", "class")):
        text += f", not {item['input']!r:.80}"
    return place, text
