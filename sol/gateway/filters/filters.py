"""All filters of a configuration: what they say of a request, and what looks at its answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal, NamedTuple

from sol.errors import RequestError
from sol.gateway.call import Call, Decision, OutputFilter
from sol.gateway.errors import RequestTooLargeError
from sol.gateway.filters.config import FilterConfig, InjectionRule, PiiRule, RuleOptions, SizeRule, TextRule
from sol.gateway.filters.decisions import MAX_DECISIONS, Counts, Digests, Finding, record
from sol.gateway.filters.detectors import BudgetError, Detection, Detector, DetectorThread
from sol.gateway.filters.errors import ContentFilteredError, FilterFailedError
from sol.gateway.filters.fields import Field, request_fields, unreadable_prompt
from sol.gateway.filters.matcher import Search
from sol.gateway.filters.output import AnswerFilter, OutputRules, StreamFilter
from sol.gateway.filters.rules import Failed, Hit, Rule, RuleSet, Subject, applies, compile_rules
from sol.gateway.filters.window import apply, redactions

logger = logging.getLogger("sol.gateway.filters")

LONG: Final = 8192
"""Characters of a request above which rules look at it in a thread, so that nobody else's chunk waits."""
_NO_TEXT_ANSWERS: Final = ("/embeddings", "/tokenize", "/detokenize", "/rerank", "/score", "/classify", "/pooling")
"""Of no model, that is."""
_TOKENS_IN_ANSWERS: Final = ("logprobs", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids")


class _Found(NamedTuple):
    hits: list[tuple[Field, Hit]]
    failures: list[tuple[Rule, Exception]]


class _Verdict(NamedTuple):
    counts: Counter[tuple[str, str, str, bool]]
    findings: list[Finding]
    refused: tuple[Field, Hit] | None
    changes: list[tuple[Field, str]]


class Filters:
    """Any number of requests at once, on one event loop. Raises `ConfigError` that names the rule."""

    def __init__(
        self, configs: Sequence[FilterConfig], make_detector: Callable[[Rule], Detector] | None = None
    ) -> None:
        """`make_detector`: of rules that ask for a classifier or for Presidio, in place of those."""
        self.counts = Counts()
        self._digests = Digests()
        self._sizes = [config for config in configs if isinstance(config, SizeRule)]
        rules = [config for config in configs if not isinstance(config, SizeRule)]
        quick = [config for config in rules if not (isinstance(config, InjectionRule) and config.classifier)]
        self._input = compile_rules([config for config in quick if config.direction != "output"])
        output = [config for config in quick if config.direction != "input"]
        withholding = [config for config in output if not config.shadow and config.action != "flag"]
        self._holding = compile_rules(withholding, streaming=True)
        self._watching = compile_rules([config for config in output if config not in withholding], streaming=True)
        self._reads_input = [config for config in rules if config.direction != "output"]
        make = make_detector or _make_detector
        slow = [Rule(config, Search()) for config in rules if _needs_detector(config)]
        self._detectors = [DetectorThread(make(rule)) for rule in slow]
        self._order = {config.name: number for number, config in enumerate(configs)}
        self._long = ThreadPoolExecutor(2, thread_name_prefix="filters")

    def close(self) -> None:
        self._long.shutdown(wait=False, cancel_futures=True)
        for detector in self._detectors:
            detector.close()

    async def check(self, call: Call) -> None:
        """Look at a request: refuse it, or redact what it holds, or let it pass.

        Raises `ContentFilteredError`, `RequestTooLargeError`, `RequestError` (another limit), `FilterFailedError`.
        """
        subject = _subject(call)
        self._check_size(call, subject)
        if not self._reads_input:
            return
        self._check_token_ids(call, subject)
        fields = list(request_fields(call.json))
        if not fields:
            return
        numbers = self._input.numbers(subject)
        long = sum(len(field.text) for field in fields) > LONG
        if numbers and long:
            found = await asyncio.get_running_loop().run_in_executor(self._long, _find, self._input, numbers, fields)
        elif numbers:
            found = _find(self._input, numbers, fields)
        else:
            found = _Found([], [])
        if self._detectors:
            threads = [thread for thread in self._detectors if applies(thread.detector.rule.config.scope, subject)]
            for more in await asyncio.gather(*(self._detect(thread, fields) for thread in threads)):
                found.hits.extend(more.hits)
                found.failures.extend(more.failures)
        if found.hits or found.failures:
            if long:
                verdict = await asyncio.get_running_loop().run_in_executor(self._long, self._judge, found)
            else:
                verdict = self._judge(found)
            self._act(call, verdict, found.failures)

    def output(self, call: Call) -> OutputFilter | None:
        """What looks at this call's answer; None: nothing need. Raises `RequestError` for answers that would carry what
        rules withhold in a form they cannot see."""
        subject = _subject(call)
        holding = (self._holding, self._holding.numbers(subject))
        watching = (self._watching, self._watching.numbers(subject))
        if not holding[1] and not watching[1]:
            return None
        if not call.path.endswith("/completions"):
            if holding[1] and not call.path.endswith(_NO_TEXT_ANSWERS):
                raise RequestError(
                    f"answers of {call.path} cannot be filtered, and this gateway filters answers: use "
                    "/v1/chat/completions",
                )
            return None
        for name in _TOKENS_IN_ANSWERS if holding[1] else ():
            if call.json.get(name) not in (None, False):
                raise RequestError(
                    f"{name} would carry the tokens of text that this gateway may withhold from the answer: leave it "
                    "out",
                    param=name,
                )

        def report(hit: Hit, where: str) -> None:
            finding = self._finding(hit, where)
            self.counts.count("output", finding)
            record(call, finding)

        def failed(rule: Rule, error: Exception) -> None:
            self._failed(call, "output", rule, error)

        rules = OutputRules(holding if holding[1] else None, watching if watching[1] else None, report, failed)
        return StreamFilter(rules) if call.stream else AnswerFilter(rules)

    def explain(
        self,
        text: str,
        *,
        role: str = "user",
        direction: Literal["input", "output"] = "input",
        subject: Subject | None = None,
    ) -> list[Decision]:
        """What all rules would decide about `text`, without counting it.

        Detectors run here and now, so this is not for an event loop. A rule that fails is a decision, too.
        """
        subject = subject or Subject()
        sets = [self._input] if direction == "input" else [self._holding, self._watching]
        field = Field("text", role, text, {}, "text")
        found = _Found([], [])
        for rules in sets:
            more = _find(rules, rules.numbers(subject), [field])
            found.hits.extend(more.hits)
            found.failures.extend(more.failures)
        for thread in self._detectors if direction == "input" else ():
            rule = thread.detector.rule
            if applies(rule.config.scope, subject) and _has_role(rule, role):
                try:
                    deadline = time.monotonic() + thread.detector.budget
                    found.hits.extend(_hits(rule, [field], thread.detector.detect([text], deadline)))
                except Exception as error:
                    found.failures.append((rule, error))
        decisions = [self._finding(hit, field.where).decision() for _, hit in self._sorted(found.hits)]
        return decisions + [_failure(rule, error).decision() for rule, error in found.failures]

    def _check_size(self, call: Call, subject: Subject) -> None:
        for rule in self._sizes:
            if applies(rule.scope, subject):
                problem = _too_big(rule, call)
                if problem is not None:
                    field, detail, error = problem
                    finding = Finding(rule.name, rule.action, rule.shadow, detail, field)
                    self.counts.count("input", finding)
                    record(call, finding)
                    if rule.action == "reject" and not rule.shadow:
                        raise error

    def _check_token_ids(self, call: Call, subject: Subject) -> None:
        where = unreadable_prompt(call.json)
        if where is None:
            return
        for rule in self._reads_input:
            scoped = applies(rule.scope, subject) and (rule.scope.roles is None or "user" in rule.scope.roles)
            if scoped and rule.token_ids == "reject" and rule.action != "flag":  # noqa: S105  (no password)
                finding = Finding(rule.name, "reject", rule.shadow, "not text", where)
                self.counts.count("input", finding)
                record(call, finding)
                if not rule.shadow:
                    raise ContentFilteredError(
                        _message(rule, where, "cannot look at a prompt that is no text: send it as text"), param=where
                    )

    async def _detect(self, thread: DetectorThread, fields: list[Field]) -> _Found:
        rule = thread.detector.rule
        fields = [field for field in fields if _has_role(rule, field.role)]
        if not fields:
            return _Found([], [])
        try:
            detections = await thread.detect([field.text for field in fields])
        except Exception as error:
            return _Found([], [(rule, error)])
        return _Found(_hits(rule, fields, detections), [])

    def _judge(self, found: _Found) -> _Verdict:
        """What is to be done. Of many findings only the first are kept."""
        hits = self._sorted(found.hits)
        counts: Counter[tuple[str, str, str, bool]] = Counter(
            (c.name, "input", c.action, c.shadow) for c in (hit.rule.config for _, hit in hits)
        )
        findings = [self._finding(hit, field.where) for field, hit in hits[:MAX_DECISIONS]]
        refused: tuple[Field, Hit] | None = None
        redacted: dict[str, tuple[Field, list[Hit]]] = {}
        for field, hit in hits:
            if hit.rule.withholds:
                if hit.rule.config.action == "reject":
                    refused = field, hit
                    break
                redacted.setdefault(field.where, (field, []))[1].append(hit)
        changes = []
        if refused is None:
            for field, of_field in redacted.values():
                of_field.sort(key=lambda hit: hit.start)
                changes.append((field, apply(field.text, redactions(of_field))))
        return _Verdict(counts, findings, refused, changes)

    def _act(self, call: Call, verdict: _Verdict, failures: list[tuple[Rule, Exception]]) -> None:
        self.counts.decisions.update(verdict.counts)
        for finding in verdict.findings:
            record(call, finding)
        if verdict.refused is not None:
            field, hit = verdict.refused
            raise ContentFilteredError(_message(hit.rule.config, field.where, "objects to"), param=field.where)
        for rule, error in failures:
            self._failed(call, "input", rule, error)
        if verdict.changes:
            for field, text in verdict.changes:
                field.container[field.key] = text  # type: ignore[index]
            call.rewrite(call.json)

    def _failed(self, call: Call, direction: str, rule: Rule, error: Exception) -> None:
        """Count a failure. Raises `FilterFailedError` if the rule must see everything that passes."""
        finding = _failure(rule, error)
        self.counts.failures[rule.config.name, "timeout" if isinstance(error, BudgetError) else "error"] += 1
        self.counts.count(direction, finding)
        record(call, finding)
        if not isinstance(error, BudgetError):
            logger.error("the filter %s failed: %s", rule.config.name, type(error).__name__, exc_info=error)
        if finding.action == "reject":
            raise FilterFailedError(f"the filter {rule.config.name!r} could not look at all of this: try again later")

    def _finding(self, hit: Hit, where: str) -> Finding:
        config = hit.rule.config
        digest = self._digests.of(hit.text)
        return Finding(config.name, config.action, config.shadow, hit.label, where, hit.start, hit.end, digest)

    def _sorted(self, hits: list[tuple[Field, Hit]]) -> list[tuple[Field, Hit]]:
        """By the order of rules in the configuration; of one rule, as they stand in the text."""
        return sorted(hits, key=lambda found: self._order[found[1].rule.config.name])


def _find(rules: RuleSet, numbers: frozenset[int], fields: Sequence[Field]) -> _Found:
    failures: list[tuple[Rule, Exception]] = []
    failed: Failed = lambda rule, error: failures.append((rule, error))  # noqa: E731
    hits = [(field, hit) for field in fields for hit in rules.find(field.text, failed, numbers, field.role)]
    return _Found(hits, failures)


def _hits(rule: Rule, fields: Sequence[Field], detections: Sequence[Detection]) -> list[tuple[Field, Hit]]:
    return [
        (fields[number], Hit(rule, label, start, end, fields[number].text[start:end]))
        for number, start, end, label in detections
    ]


def _has_role(rule: Rule, role: str) -> bool:
    return rule.config.scope.roles is None or role in rule.config.scope.roles


def _failure(rule: Rule, error: Exception) -> Finding:
    """Of a rule that only flags, or is in shadow, nothing depends on what it sees."""
    action = "reject" if rule.withholds and rule.config.on_error == "reject" else "pass"
    reason = "out of time" if isinstance(error, BudgetError) else f"failed: {type(error).__name__}"
    return Finding(rule.config.name, action, False, reason, "")


def _message(rule: RuleOptions, where: str, does: str) -> str:
    return (
        rule.message or f"the filter {rule.name!r} of this gateway {does}{f' {where}' if does.endswith('to') else ''}"
    )


def _subject(call: Call) -> Subject:
    return Subject(call.model, call.class_name, call.principal.tenant if call.principal else "")


def _needs_detector(config: TextRule) -> bool:
    return (isinstance(config, InjectionRule) and config.classifier is not None) or (
        isinstance(config, PiiRule) and config.presidio is not None
    )


def _make_detector(rule: Rule) -> Detector:
    """What it needs is imported only where it is asked for."""
    if isinstance(rule.config, InjectionRule):
        from sol.gateway.filters.classifier import OnnxClassifier

        return OnnxClassifier(rule)
    from sol.gateway.filters.presidio import PresidioDetector

    return PresidioDetector(rule)


def _too_big(rule: SizeRule, call: Call) -> tuple[str, str, RequestError | RequestTooLargeError] | None:
    """The field, by how much, and the error."""
    messages = call.json.get("messages")
    count = len(messages) if isinstance(messages, list) else 0
    if rule.max_bytes is not None and len(call.body) > rule.max_bytes:
        return _excess(rule, "body", rule.max_bytes, len(call.body), "bytes")
    if rule.max_messages is not None and count > rule.max_messages:
        return _excess(rule, "messages", rule.max_messages, count, "messages")
    if rule.max_input_tokens is not None:
        tokens = call.input_tokens or estimate_tokens(call.json)
        if tokens > rule.max_input_tokens:
            field = "messages" if count else "prompt"
            return _excess(rule, field, rule.max_input_tokens, tokens, "tokens, by estimate")
    if rule.max_output_tokens is not None and (call.output_tokens or 0) > rule.max_output_tokens:
        size = call.output_tokens or 0
        return _excess(rule, _length_field(call.json), rule.max_output_tokens, size, "tokens of output")
    return None


def _excess(
    rule: SizeRule, field: str, limit: int, size: int, unit: str
) -> tuple[str, str, RequestError | RequestTooLargeError]:
    text = rule.message or f"{field}: at most {limit} {unit} are allowed here, these are {size}"
    error = RequestTooLargeError(text) if unit == "bytes" else RequestError(text, param=field)
    return field, f"{size} > {limit} {unit}", error


def _length_field(body: dict[str, Any]) -> str:
    return "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"


def estimate_tokens(body: dict[str, Any]) -> int:
    """Of a request that nobody has counted: four letters of Latin script, or one Chinese character, a token."""
    prompt = body.get("prompt", body.get("input"))
    if unreadable_prompt(body) is not None and isinstance(prompt, list):
        return sum(len(item) if isinstance(item, list) else 1 for item in prompt)
    ascii_characters = others = 0
    for field in request_fields(body):
        length = len(field.text)
        plain = length if field.text.isascii() else len(field.text.encode("ascii", "ignore"))
        ascii_characters += plain
        others += length - plain
    return (ascii_characters + 3) // 4 + others
