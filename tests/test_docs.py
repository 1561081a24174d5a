"""The pages say what the commands and the measurements say."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_commands_page_is_the_commands_own_help(generate):
    written = generate.PAGE.read_text(encoding="utf-8")
    assert written == generate.commands_page(), "run python docs/generate.py"


def test_the_table_of_speeds_is_made_from_the_measurements(generate):
    written = generate.README.read_text(encoding="utf-8")
    assert written == generate.readme(), "run python docs/generate.py"
