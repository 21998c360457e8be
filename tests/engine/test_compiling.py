"""Requests that wait for their grammars: nobody waits with them, and they leave as others do."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
from token_runner import FailingRunner, make_config, make_core, make_request

from sol.engine.core import EngineCore
from sol.engine.types import RequestOutput
from sol.errors import EngineDeadError, RequestError
from sol.grammar import Grammar

GRAMMAR, OTHER = Grammar.regex("a"), Grammar.regex("b")


class Compiler:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.futures: dict[Grammar, Future[None]] = {}

    def is_compiled(self, grammar: Grammar) -> bool:
        future = self.futures.get(grammar)
        return future is not None and future.done() and future.exception() is None

    def submit(self, grammar: Grammar) -> Future[None]:
        return self.futures.setdefault(grammar, Future())


def finish(core: EngineCore) -> dict[str, RequestOutput]:
    """Step while there is work; each request's last output."""
    last = {}
    while core.has_work:
        for output in core.step().outputs:
            last[output.request_id] = output
        core.check_integrity()
    return last


@pytest.mark.parametrize("work_ahead", [0, 1])
def test_a_request_waits_for_its_grammar_and_its_neighbours_do_not(work_ahead: int) -> None:
    compiler = Compiler()
    core = make_core(grammars=compiler, work_ahead=work_ahead)
    core.add([make_request("held", [1, 2], grammar=GRAMMAR, max_tokens=3), make_request("free", [3], max_tokens=4)])
    assert core.step().stats.num_waiting == 1
    assert list(finish(core)) == ["free"]
    assert (core.has_work, core.awaits_grammars) == (False, True)
    assert core.step().stats.num_waiting == 1
    compiler.futures[GRAMMAR].set_result(None)
    assert core.has_work
    assert finish(core)["held"].finish_reason == "length"
    assert not core.awaits_grammars
    core.add([make_request("at once", [1], grammar=GRAMMAR, max_tokens=1)])
    core.step()
    assert not core.awaits_grammars


def test_an_engine_that_waits_for_work_hears_of_a_grammar_from_another_thread() -> None:
    compiler = Compiler()
    core = make_core(grammars=compiler)
    core.add([make_request("held", [1], grammar=GRAMMAR, max_tokens=1)])
    core.step()
    thread = threading.Thread(target=compiler.futures[GRAMMAR].set_result, args=(None,))
    thread.start()
    core.wait()
    assert finish(core)["held"].finish_reason == "length"
    thread.join()


def test_a_grammar_that_cannot_be_compiled_ends_those_who_want_it() -> None:
    compiler = Compiler()
    core = make_core(grammars=compiler)
    core.add([make_request(name, [1], grammar=GRAMMAR) for name in ("a", "b")])
    core.add([make_request("c", [1], grammar=OTHER, max_tokens=1)])
    core.step()
    compiler.futures[GRAMMAR].set_exception(RequestError("no such rule"))
    compiler.futures[OTHER].set_result(None)
    last = finish(core)
    assert [(last[name].finish_reason, last[name].error) for name in ("a", "b")] == [
        ("error", "grammar: no such rule")
    ] * 2
    assert last["c"].finish_reason == "length"


def test_a_request_that_waits_can_leave() -> None:
    compiler = Compiler()
    core = make_core(grammars=compiler)
    core.add([make_request("a", [1], grammar=GRAMMAR)])
    core.step()
    core.abort(["a"])
    (output,) = core.step().outputs
    assert (output.request_id, output.finish_reason) == ("a", "abort")
    # Another one has come under its name before the grammar is there.
    core.add([make_request("a", [2], grammar=OTHER, max_tokens=2)])
    core.step()
    compiler.futures[GRAMMAR].set_result(None)
    assert finish(core) == {}
    compiler.futures[OTHER].set_result(None)
    assert finish(core)["a"].finish_reason == "length"


def test_two_requests_with_one_id_both_end() -> None:
    compiler = Compiler()
    core = make_core(grammars=compiler)
    core.add([make_request("a", [1], grammar=GRAMMAR)])
    core.step()
    core.add([make_request("a", [2])])
    (output,) = core.step().outputs
    assert (output.finish_reason, output.error) == ("error", "request_id 'a' is in use")
    assert not core.awaits_grammars
    compiler.futures[GRAMMAR].set_result(None)
    assert finish(core) == {}


def test_an_engine_that_fails_ends_those_who_wait_for_grammars_too() -> None:
    core = make_core(runner=FailingRunner(make_config()), grammars=Compiler())
    core.add([make_request("held", [1], grammar=GRAMMAR), make_request("free", [1], max_tokens=9)])
    core.step()
    ended = {output.request_id: output.finish_reason for output in core.step().outputs}
    assert ended == {"held": "error", "free": "error"}
    with pytest.raises(EngineDeadError):
        core.step()


def test_an_engine_without_a_compiler_refuses_grammars() -> None:
    core = make_core()
    core.add([make_request("a", [1], grammar=GRAMMAR)])
    (output,) = core.step().outputs
    assert "without a tokenizer" in (output.error or "")
    with pytest.raises(RequestError, match="without a tokenizer"):
        core.check_grammar(GRAMMAR)
