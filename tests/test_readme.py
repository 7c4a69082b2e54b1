"""The README says what the code does: flags, files, functions and tests that it names exist."""
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
TESTS = "\n".join(f.read_text() for f in (ROOT / "tests").glob("test_*.py"))


def commands() -> list[str]:
    """Every command line in the README that runs one of the project's scripts."""
    lines = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
    lines += re.findall(r"`((?:python|torchrun)[^`]*\.py[^`]*)`", README)
    return [part.split("#")[0].strip() for line in lines for part in line.split("&&") if ".py" in part]


def test_every_script_and_flag_in_the_readme_exists():
    helps = {}
    for command in commands():
        script = next(word for word in command.split() if word.endswith(".py"))
        assert (ROOT / script).is_file(), command
        flags = re.findall(r"(?<=\s)--[a-z0-9-]+", command.split(script, 1)[1])
        if flags and script not in helps:
            helps[script] = subprocess.run([sys.executable, ROOT / script, "--help"], capture_output=True, text=True,
                                           cwd=ROOT).stdout
        assert all(re.search(rf"{flag}(?![a-z-])", helps[script]) for flag in flags), command


@pytest.mark.fast
def test_every_file_in_the_readme_exists():
    for name in re.findall(r"`((?:[a-z0-9_]+/)?[a-z0-9_]+\.(?:py|ipynb|txt))`", README):
        assert (ROOT / name).is_file(), name
    for folder in (".", "results", "tiny", "small"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / folder / "README.md").read_text()):
            assert "://" in target or (ROOT / folder / target).exists(), target


@pytest.mark.fast
def test_every_row_of_the_equation_table_names_a_function_and_a_test_that_exist():
    rows = re.search(r"## Equations\n\n(.*?)\n\n", README, re.DOTALL)[1].splitlines()[2:]
    assert len(rows) >= 10
    for row in rows:
        _, functions, tests = row.strip("|").split("|")
        for module, name in re.findall(r"`(\w+)\.(\w+)`", functions):
            assert callable(getattr(import_module(module), name)), row
        for test in re.findall(r"`(test_\w+)`", tests):
            assert f"def {test}(" in TESTS, row
        assert re.search(r"`test_\w+`", tests), row


@pytest.mark.fast
def test_every_test_that_the_readme_names_exists():
    for test in set(re.findall(r"`(test_\w+)`", README)):
        assert f"def {test}(" in TESTS, test


@pytest.mark.fast
def test_every_logged_metric_is_in_the_glossary():
    source = (ROOT / "train.py").read_text()
    columns = re.search(r"COLUMNS = \((.*?)\)", source, re.DOTALL)[1]
    for name in re.findall(r'"(\w+)"', columns):
        assert f"`{name}`" in README.split("## What the log says")[1], name
