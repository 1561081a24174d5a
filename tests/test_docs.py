"""The pages under docs say what the commands say."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_the_commands_page_is_the_commands_own_help():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert generate.PAGE.read_text(encoding="utf-8") == generate.commands_page(), (
        "run python docs/generate.py"
    )
