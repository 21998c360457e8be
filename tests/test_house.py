"""The repository keeps its own promises: documented flags exist and the other way round, README commands work."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from sol.cli import build_parser

ROOT = Path(__file__).parents[1]
SERVE_PAGE = (ROOT / "docs" / "serve.md").read_text()


def command_flags(command: str) -> set[str]:
    parser = build_parser()
    subparsers = next(action for action in parser._actions if hasattr(action, "choices") and action.choices)
    assert subparsers.choices is not None
    return {
        flag
        for action in subparsers.choices[command]._actions
        for flag in action.option_strings
        if flag.startswith("--")
    }


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "pull", "doctor", "verify"])
def test_every_flag_is_documented(command: str) -> None:
    undocumented = {flag for flag in command_flags(command) if f"`{flag}`" not in SERVE_PAGE}
    assert undocumented == {"--help"}


def test_every_documented_flag_exists() -> None:
    known = set().union(
        *(command_flags(command) for command in ("serve", "generate", "chat", "pull", "doctor", "verify"))
    )
    assert set(re.findall(r"`(--[a-z-]+)`", SERVE_PAGE)) <= known


def test_make_targets_that_the_documentation_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z_]+) \?=", makefile, re.MULTILINE))
    for page in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "docs/serve.md", "docs/design.md"):
        text = (ROOT / page).read_text()
        for line in re.findall(r"(?:^    |`)make ([^`#\n]*)", text, re.MULTILINE):
            words = re.sub(r'"[^"]*"', "", line).split()
            assert {word for word in words if "=" not in word} <= targets, (page, line)
            assert {word.partition("=")[0] for word in words if "=" in word} <= variables, (page, line)


def test_documents_link_to_files_and_headings_that_exist() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        text = page.read_text()
        headings = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.M)}
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("#"):
                assert target[1:] in headings, (page.name, target)
            elif not target.startswith("http"):
                assert (page.parent / target.partition("#")[0]).exists(), (page.name, target)


def test_both_readmes_show_the_same_commands_and_numbers() -> None:
    english, chinese = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))

    def code(text: str) -> list[str]:
        lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE) + re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
        return [line.partition("  #")[0].rstrip() for line in lines]

    assert code(english) == code(chinese)
    assert len(code(english)) >= 4
    assert re.findall(r"\d+(?:\.\d+)?", "".join(english.split("## ")[4:5])) == re.findall(
        r"\d+(?:\.\d+)?", "".join(chinese.split("## ")[4:5])
    )


def test_no_tracked_file_names_a_developers_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    # Written backwards, so that this file does not find itself.
    words = ("/krow/", "/w/pmt/", "/toor/", "gro.ipyp", "detsohnohtyp", "gro.naibed.bed", "sjmpn.yrtsiger")
    forbidden = re.compile("|".join(re.escape(word[::-1]) for word in words))
    found = []
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if name and path.is_file():
            text = path.read_text(errors="ignore")
            found += [f"{name}: {match.group(0)}" for match in forbidden.finditer(text)]
    assert found == []


def test_every_dependency_is_explained_and_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    design = (ROOT / "docs" / "design.md").read_text()
    import_names = {
        "huggingface-hub": "huggingface_hub",
        "nvidia-ml-py": "pynvml",
        "pyyaml": "yaml",
        "pyzmq": "zmq",
        "prometheus-client": "prometheus_client",
    }
    source = "".join(path.read_text() for path in (ROOT / "sol").rglob("*.py"))
    for requirement in project["dependencies"] + project["optional-dependencies"]["serve"]:
        name = re.split(r"[^A-Za-z0-9-]", requirement)[0]
        assert re.search(rf"^\|.*\b{re.escape(name)}\b", design, re.MULTILINE), f"{name} is not in docs/design.md"
        module = import_names.get(name, name)
        used = re.search(rf"^\s*(import|from) {module}\b", source, re.MULTILINE) or f'"{module}"' in source
        assert used, f"{name} is required but not imported"


def test_modules_of_tests_have_names_of_their_own() -> None:
    """pytest puts every directory of tests on the path: of two modules of one name, one hides the other."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []
