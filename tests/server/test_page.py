"""The page at `/`: what it may do, and what it does in a real browser."""

from __future__ import annotations

import base64
import hashlib
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import MISSING, Browser, Page, find_chromium
from running_server import ENGINE, KEY, Server, start_server
from scripted_server import Script, Segments, scripted_server

import sol.server.page
from sol.models.source import ModelFiles
from sol.server.config import ServerConfig
from sol.server.routes import create_app
from sol.server.state import ServerState

STATIC = Path(sol.server.page.__file__).with_name("static")
HOSTILE = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>'
ANSWER = "document.querySelector('article.assistant:last-child')"
ANSWERED = f"{ANSWER}?.ariaBusy === 'false'"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if find_chromium() is None:
        pytest.skip(MISSING)
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def script() -> Iterator[Script]:
    with scripted_server() as script:
        yield script


@pytest.fixture
def page(browser: Browser, script: Script) -> Iterator[Page]:
    with browser.page(f"{script.url}/") as page:
        page.wait_for("document.body.dataset.ready === 'true'")
        yield page


def ask(page: Page, text: str) -> None:
    page.write(text, into="#message")
    page.press("Enter")
    page.wait_for(ANSWERED)


def number(page: Page, name: str, inside: str = "article.assistant:last-child") -> str:
    return page.text(f"{inside} [data-number='{name}'] dd")


def spans(page: Page, inside: str = "article.assistant:last-child") -> list[list[str]]:
    """[origin, text] of each."""
    query = f"[...document.querySelectorAll('{inside} .text .token')].map(n => [n.dataset.origin, n.textContent])"
    found: list[list[str]] = page.evaluate(query)
    return found


# Over HTTP


@pytest.fixture
async def http() -> Any:
    app = create_app(ServerState(ServerConfig(api_keys=(KEY,))))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://sol") as client:
        yield client


async def test_the_page_needs_no_key_and_no_model(http: httpx.AsyncClient) -> None:
    response = await http.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "set-cookie" not in response.headers
    assert len(response.content) < 60_000
    assert (await http.post("/")).status_code == 405


async def test_the_policy_allows_what_the_page_holds_and_nothing_else(http: httpx.AsyncClient) -> None:
    response = await http.get("/")
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert texts
        assert policy.pop(directive).split() == [f"'sha256-{digest}'" for digest in digests]
    assert policy == {
        "default-src": "'none'",
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert set(re.findall(r"https?://[^'\"\s]*", response.text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<[^>]*\s(on\w+|style)=", response.text.partition("<script>")[0])


async def test_an_unchanged_page_is_not_sent_again(http: httpx.AsyncClient) -> None:
    etag = (await http.get("/")).headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        response = await http.get("/", headers={"if-none-match": known})
        assert (response.status_code, response.content) == (304, b""), known
        assert response.headers["etag"] == etag
    assert (await http.get("/", headers={"if-none-match": '"other"'})).status_code == 200


def test_head_has_the_headers_alone(script: Script) -> None:
    head, get = httpx.head(f"{script.url}/"), httpx.get(f"{script.url}/")
    assert head.status_code == 200
    assert head.content == b""
    for name in ("content-length", "etag", "content-security-policy"):
        assert head.headers[name] == get.headers[name]


def test_scripts_make_no_markup_of_text() -> None:
    for path in STATIC.glob("*.js"):
        dangerous = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function|cookie"
        assert not re.search(dangerous, path.read_text()), path.name


def test_an_installed_sol_has_the_page() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    if not project.exists():
        pytest.skip("not a source tree")
    patterns = tomllib.loads(project.read_text())["tool"]["setuptools"]["package-data"]["sol.server"]
    for path in STATIC.iterdir():
        assert any(fnmatch(f"static/{path.name}", pattern) for pattern in patterns), path.name


# In a browser, with answers that the test writes


def test_an_answer_shows_who_made_each_token(page: Page, script: Script) -> None:
    script.chunks = lambda body: [
        [("The", "target", 1)],
        [(" sun is", "suffix", 2), (" a", "target", 1)],
        [(" star", "ngram", 1), (" in", "target", 1)],
        [(" the", "target", 1)],
    ]
    script.usage = {
        "steps": 4, "draft_tokens": 6, "accepted_tokens": 3, "acceptance_rate": 0.5, "mean_acceptance_length": 2.5,
        "tokens_per_step": 1.75, "speedup": 1.3, "drafters": {},
    }  # fmt: skip
    script.delay = 0.01
    ask(page, "What is the sun?")
    assert spans(page) == [
        ["target", "The"],
        ["suffix", " sun is"],
        ["target", " a"],
        ["ngram", " star"],
        ["target", " in the"],
    ]
    assert number(page, "tokens") == "7"
    assert float(number(page, "tokens/s")) > 0
    assert number(page, "MAL") == "2.50"
    assert number(page, "tokens/step") == "1.75"
    assert number(page, "accepted") == "50%"
    assert number(page, "speed-up") == "1.30×"
    assert page.text("article .origin-words") == "target 57% · suffix 29% · ngram 14%"
    # Not by colour alone: each has an underline of its own, and says who it is.
    assert page.style("article [data-origin=suffix].token", "textDecorationStyle") == "solid"
    assert page.style("article [data-origin=ngram].token", "textDecorationStyle") == "dashed"
    assert page.style("article [data-origin=target].token", "textDecorationLine") == "none"
    assert page.evaluate("document.querySelector('article [data-origin=suffix].token').title.startsWith('suffix: 2')")
    assert page.text("#legend").split("\n")[::2] == ["target", "ngram", "suffix"]
    # The conversation goes on.
    ask(page, "And the moon?")
    (first, second) = script.bodies
    assert first["stream_options"] == {"include_usage": True, "include_speculation": True}
    assert [message["content"] for message in second["messages"]] == [
        "What is the sun?",
        "The sun is a star in the",
        "And the moon?",
    ]
    assert page.complaints == []
    assert {url for _, url in page.requests if not url.startswith((f"{script.url}/", "data:"))} == set()


def test_numbers_are_shown_while_the_answer_comes(page: Page, script: Script) -> None:
    script.chunks = lambda body: [[("a b c", "suffix", 3), (" d", "target", 1)]] * 1000
    script.length, script.delay = 3.25, 0.01
    page.write("Go on", into="#message")
    page.press("Enter")
    page.wait_for(f"Number({ANSWER}?.querySelector('[data-number=tokens] dd')?.textContent) >= 12")
    assert page.evaluate(f"{ANSWER}.ariaBusy") == "true"
    assert number(page, "MAL") == "3.25"
    assert number(page, "tokens/step") == "4.00"
    assert float(number(page, "tokens/s")) > 0
    page.press("Escape")
    page.wait_for(ANSWERED)


def test_an_answer_without_origins_is_the_targets(page: Page, script: Script) -> None:
    script.with_segments = False
    script.chunks = lambda body: [[("One ", "x", 1)], [("two", "x", 1)]]
    ask(page, "Count")
    assert spans(page) == [["target", "One two"]]
    assert number(page, "tokens") == "2"
    assert number(page, "MAL") == "–"


@pytest.mark.parametrize("path", ["/some/prefix", "/some/prefix/"])
def test_the_page_works_behind_a_path(browser: Browser, script: Script, path: str) -> None:
    with browser.page(script.url + path) as page:
        page.wait_for("document.body.dataset.ready === 'true'")
        ask(page, "Hi")
        assert spans(page) == [["target", "Hello"]]
        asked = [url.removeprefix(script.url) for _, url in page.requests if url.startswith("http")]
        assert asked == [path, "/some/prefix/v1/models", "/some/prefix/v1/chat/completions"]


def test_text_is_never_markup(browser: Browser, script: Script) -> None:
    script.models = [{"id": HOSTILE, "max_model_len": 512, "drafters": [HOSTILE, "suffix"]}]
    script.chunks = lambda body: [[(HOSTILE[:9], "suffix", 1)], [(HOSTILE[9:], HOSTILE, 1), (HOSTILE, "target", 1)]]
    with browser.page(f"{script.url}/") as page:
        page.wait_for("document.body.dataset.ready === 'true'")
        ask(page, HOSTILE)
        assert page.text("article.user") == HOSTILE
        assert page.text("article.assistant .text") == HOSTILE * 2
        page.click("#tab-race")
        page.click("#race-start")
        page.wait_for("document.querySelector('#race-stop').hidden")
        page.click("#tab-chat")
        script.failure = 400, HOSTILE
        ask(page, "again")
        assert page.text("article.assistant:last-child .note") == HOSTILE
        assert page.evaluate("document.querySelectorAll('img, #log script').length") == 0
        assert page.evaluate("window.hacked") is None
        assert [complaint for complaint in page.complaints if "status of 400" not in complaint] == []


def test_an_error_is_told_and_the_question_given_back(page: Page, script: Script) -> None:
    script.failure = 400, "max_tokens is too large"
    ask(page, "Hi")
    assert page.text("article.assistant .note") == "max_tokens is too large"
    assert page.evaluate("document.querySelector('#message').value") == "Hi"
    script.failure, script.breaks = None, "the engine ended"
    ask(page, "Hi")
    assert page.text("article.assistant:last-child .text") == "Hello"
    assert page.text("article.assistant:last-child .note") == "the engine ended"
    script.breaks = ""
    ask(page, "Hi")
    assert "before the answer was complete" in page.text("article.assistant:last-child .note")
    assert [message["role"] for message in script.bodies[-1]["messages"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_an_answer_can_be_stopped(page: Page, script: Script, how: str) -> None:
    script.chunks = lambda body: [[(f"{index} ", "target", 1)] for index in range(1000)]
    script.delay = 0.01
    page.write("Count", into="#message")
    page.press("Enter")
    page.wait_for(f"{ANSWER}.querySelector('.token')")
    assert page.evaluate("document.querySelector('#send').hidden")
    if how == "Escape":
        page.press("Escape")
    else:
        page.click("#stop")
    page.wait_for(ANSWERED)
    assert page.text("article.assistant .note") == "Stopped."
    assert page.text("article.assistant .text").startswith("0 1")
    assert page.evaluate("document.querySelector('#stop').hidden")
    assert page.complaints == []


def _racing(body: dict[str, Any]) -> list[Segments]:
    if (body.get("speculation") or {}).get("enabled") is False:
        return [[(f"{index} ", "target", 1)] for index in range(8)]
    return [[("0 ", "target", 1)], [("1 2 3 4 5 6 ", "suffix", 6), ("7 ", "target", 1)]]


def test_a_race_takes_turns_and_compares_texts(page: Page, script: Script) -> None:
    script.chunks = _racing
    script.delay = 0.01
    script.usage = {"steps": 2, "draft_tokens": 6, "accepted_tokens": 6, "acceptance_rate": 1.0,
                    "mean_acceptance_length": 7.0, "tokens_per_step": 4.0, "speedup": 3.5, "drafters": {}}  # fmt: skip
    page.click("#tab-race")
    page.write("Count to seven", into="#race-prompt")
    page.click("#race-start")
    page.wait_for("document.querySelector('#race-stop').hidden")
    assert "Same text in all 4 runs" in page.text("#verdict")
    ratio = re.match(r"(\d+\.\d\d)× the speed of plain decoding", page.text("#verdict"))
    assert ratio is not None
    assert float(ratio[1]) > 1
    assert spans(page, "[data-lane=speculative]")[1] == ["suffix", "1 2 3 4 5 6 "]
    assert spans(page, "[data-lane=plain]") == [["target", "0 1 2 3 4 5 6 7 "]]
    assert number(page, "MAL", "[data-lane=speculative]") == "7.00"
    assert number(page, "MAL", "[data-lane=plain]") == "–"
    wishes = [(body["max_completion_tokens"], body.get("speculation")) for body in script.bodies]
    off = {"enabled": False}
    assert wishes == [(1, off), (256, off), (256, None), (256, None), (256, off)]
    assert len({body["seed"] for body in script.bodies}) == 1
    page.click("#race-replay")
    page.wait_for("document.querySelector('[data-lane=plain]').dataset.state === 'running'")
    page.press("Escape")
    page.wait_for("document.querySelector('#race-stop').hidden")
    assert spans(page, "[data-lane=plain]") == [["target", "0 1 2 3 4 5 6 7 "]]
    assert page.complaints == []


def test_a_race_says_where_texts_differ(page: Page, script: Script) -> None:
    script.chunks = lambda body: [[("abc" if body.get("speculation") else "abX", "target", 1)]]
    page.click("#tab-race")
    page.click("#race-start")
    page.wait_for("document.querySelector('#verdict').dataset.state === 'different'")
    assert "differ from character 3 on" in page.text("#verdict")


def test_a_race_that_is_stopped_or_fails_compares_nothing(page: Page, script: Script) -> None:
    script.chunks = lambda body: [[(f"{index} ", "target", 1)] for index in range(body["max_completion_tokens"])]
    script.delay = 0.01
    page.click("#tab-race")
    page.click("#race-start")
    page.wait_for("document.querySelector('.lane .token')")
    page.click("#race-stop")
    page.wait_for("document.querySelector('#race-stop').hidden")
    assert page.text("#verdict") == "Stopped before the end: nothing to compare."
    script.failure = 503, "the server is shutting down"
    page.click("#race-start")
    page.wait_for("document.querySelector('#verdict').dataset.state === 'failed'")
    assert page.text("#verdict") == "the server is shutting down"


def test_a_server_without_drafters_has_no_race(browser: Browser, script: Script) -> None:
    script.models = [{"id": "m", "max_model_len": 512, "drafters": []}]
    with browser.page(f"{script.url}/") as page:
        page.wait_for("document.body.dataset.ready === 'true'")
        page.click("#tab-race")
        assert "does not speculate" in page.text("#verdict")
        assert page.evaluate("document.querySelector('#race-start').disabled")
        page.click("#tab-chat")
        ask(page, "Hi")
        assert spans(page) == [["target", "Hello"]]


def test_settings_are_sent_and_impossible_ones_are_not(page: Page, script: Script) -> None:
    page.write("7", into="#seed")
    page.write("32", into="#max-tokens")
    for value in ("ngram", "(none)"):
        page.evaluate(f"document.querySelector('#drafter').value = '{value}'")
        ask(page, "Hi")
    common = {"model": "m", "temperature": 0, "max_completion_tokens": 32, "seed": 7, "stream": True}
    wishes: list[dict[str, Any]] = [{"drafter": "ngram"}, {"enabled": False}]
    assert [{**body, "messages": [], "stream_options": {}} for body in script.bodies] == [
        {**common, "speculation": wish, "messages": [], "stream_options": {}} for wish in wishes
    ]
    page.write("100000", into="#max-tokens")  # more than the context
    page.write("Hi", into="#message")
    page.press("Enter")
    assert page.evaluate("document.activeElement.id") == "max-tokens"
    assert page.evaluate("document.querySelector('#message').value") == "Hi"
    assert len(script.bodies) == 2


def test_the_page_waits_for_a_server_that_is_loading(browser: Browser, script: Script) -> None:
    script.loading = "the model is still loading"
    with browser.page(f"{script.url}/", width=360, height=700) as page:
        page.wait_for("document.querySelector('#notice').innerText === 'the model is still loading'")
        page.write("Hi", into="#message")
        page.press("Enter")
        assert page.evaluate("document.querySelector('#message').value") == "Hi"
        script.loading = None
        page.wait_for("document.body.dataset.ready === 'true'")
        assert page.text("#notice") == ""
        page.press("Enter")
        page.wait_for(ANSWERED)


def test_keys_move_between_the_tabs(page: Page, script: Script) -> None:
    page.evaluate("document.querySelector('#tab-chat').focus()")
    page.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-race"
    assert page.evaluate("[document.querySelector('#chat').hidden, document.querySelector('#race').hidden]") == [
        True,
        False,
    ]


_CONTRAST = """
(() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (colour) => {
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const parts = [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)].map((value) => value / 255);
    const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const probe = document.body.appendChild(document.createElement("i"));
  const named = (name) => ((probe.style.color = `var(--${name})`), light(getComputedStyle(probe).color));
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const found = {};
  const check = (front, back, kind = "text") =>
    (found[`${kind} in ${front} on ${back}`] = ratio(named(front), named(back)));
  for (const back of ["page", "surface", "raised"])
    for (const front of ["ink", "muted", "bad", "good"]) check(front, back);
  check("on-accent", "accent");
  for (const front of ["suffix", "ngram", "draft-model", "early-exit", "other"])
    check(front, "page", "underline");
  probe.remove();
  return found;
})()
"""


def test_both_themes_are_readable(browser: Browser, script: Script) -> None:
    backgrounds = []
    for scheme in ("light", "dark"):
        with browser.page(f"{script.url}/", scheme=scheme) as page:
            backgrounds.append(page.style("body", "backgroundColor"))
            # WCAG 2.2 AA: 4.5 for text, 3 for what only has to be seen.
            ratios = page.evaluate(_CONTRAST)
            assert len(ratios) == 18
            for pair, ratio in ratios.items():
                assert ratio >= (3 if pair.startswith("underline") else 4.5), (scheme, pair, ratio)
            # A choice is stronger than the system's, and remembered.
            page.evaluate("(box => { box.value = 'light'; box.dispatchEvent(new Event('change')); })(theme)")
            assert page.style("body", "backgroundColor") == backgrounds[0]
            page.go(f"{script.url}/")
            assert page.style("body", "backgroundColor") == backgrounds[0]
    assert backgrounds[0] != backgrounds[1]


def test_the_page_fits_a_phone(browser: Browser, script: Script) -> None:
    script.chunks = lambda body: [[("word " * 60 + "x" * 200, "suffix", 60)]]
    with browser.page(f"{script.url}/", width=360, height=700) as page:
        page.wait_for("document.body.dataset.ready === 'true'")
        ask(page, "Hi " * 50 + "y" * 200)
        page.click("#tab-race")
        page.click("#race-start")
        page.wait_for("document.querySelector('#race-stop').hidden")
        for tab in ("race", "chat"):
            page.click(f"#tab-{tab}")
            assert page.evaluate("document.documentElement.scrollWidth") == 360
            assert page.evaluate(f"document.querySelector('#{tab}').scrollWidth") <= 360
        assert page.evaluate("document.querySelector('#temperature').checkVisibility()") is False
        page.click("#toggle-settings")
        assert page.evaluate("document.querySelector('#temperature').checkVisibility()") is True
        page.click("#toggle-settings")
        ask(page, "Hi")


# In a browser, with a real model


@pytest.fixture(scope="module")
def server(smollm2: ModelFiles) -> Iterator[Server]:
    """It drafts whenever it finds something, so that what the page shows does not hang on how fast the machine is."""
    engine = {**ENGINE, "speculative_config": {"method": "suffix", "controller": "fixed"}}
    with start_server(engine=engine, api_keys=[KEY]) as server:
        server.wait_until_ready()
        yield server
        assert server.stop() == 0


def test_a_real_server_from_the_key_to_the_race(browser: Browser, server: Server) -> None:
    with browser.page(f"{server.url}/") as page:
        page.wait_for("!document.querySelector('#key-field').hidden")
        assert page.text("#notice") == "This server asks for an API key."
        assert page.evaluate("document.activeElement.id") == "api-key"
        page.write("wrong")
        page.press("Enter")
        page.wait_for("document.querySelector('#notice').innerText.includes('unknown API key')")
        page.write(KEY, into="#api-key")
        page.press("Enter")
        page.wait_for("document.body.dataset.ready === 'true'")
        assert page.evaluate("document.activeElement.id") == "message"
        page.complaints.clear()  # the browser's own lines about the two refusals

        # Copied from the prompt, so that there is something to draft from.
        prompt = (
            "Copy this text: The sun is the star at the center of the solar system. "
            "The sun is a nearly perfect ball of hot plasma."
        )
        ask(page, prompt)
        answer = page.text("article.assistant .text")
        assert answer
        assert {origin for origin, _ in spans(page)} >= {"target", "suffix"}
        assert "".join(text for _, text in spans(page)).strip() == answer
        assert float(number(page, "tokens/s")) > 0
        assert float(number(page, "MAL")) > 1

        page.evaluate("document.querySelector('#max-tokens').value = 64")
        page.click("#tab-race")
        page.evaluate("document.querySelector('#rounds').value = '1'")
        page.write(prompt, into="#race-prompt")
        page.click("#race-start")
        page.wait_for("document.querySelector('#race-stop').hidden")
        assert "✓ Same text in all 2 runs" in page.text("#verdict")
        assert {origin for origin, _ in spans(page, "[data-lane=plain]")} == {"target"}
        assert page.complaints == []


def test_stopping_ends_the_work_of_a_real_server(browser: Browser, server: Server) -> None:
    with browser.page(f"{server.url}/") as page:
        page.wait_for("!document.querySelector('#key-field').hidden")
        page.write(KEY)
        page.press("Enter")
        page.wait_for("document.body.dataset.ready === 'true'")
        before = server.metrics()["vllm:request_success_total abort"]
        page.evaluate("document.querySelector('#max-tokens').value = 400")
        page.write("Write a very long story about a lighthouse.", into="#message")
        page.press("Enter")
        page.wait_for(f"{ANSWER}.querySelector('.token')")
        page.press("Escape")
        page.wait_for(ANSWERED)
        assert server.wait_until_idle()["vllm:request_success_total abort"] == before + 1
