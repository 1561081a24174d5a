"""The layout that keeps three packages in one distribution apart, as the design states it."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "mamba_kernels": ROOT / "kernels" / "mamba_kernels",
    "mamba_cli": ROOT / "mamba_cli",
    "mamba_commands": ROOT / "commands" / "mamba_commands",
}
# Dependencies go strictly one way: each package may import those before it.
MAY_IMPORT = {
    "mamba_kernels": set(),
    "mamba_cli": {"mamba_kernels"},
    "mamba_commands": {"mamba_kernels", "mamba_cli"},
}


def imports(file: Path) -> set[str]:
    """Return the top-level names of all modules that `file` imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names.add(node.module.split(".")[0])
    return names


def sources(package: str) -> list[Path]:
    found = sorted(PACKAGES[package].rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("folder", ["kernels", "commands", "tests", "benchmarks"])
def test_source_roots_are_not_packages(folder):
    # An importable top-level `kernels` shadows Hugging Face's package, which transformers looks up.
    assert (ROOT / folder).is_dir() and not (ROOT / folder / "__init__.py").exists()


def test_there_is_no_conftest_at_the_root():
    assert not (ROOT / "conftest.py").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_typed(package):
    assert (PACKAGES[package] / "py.typed").read_text() == ""
    assert (PACKAGES[package] / "__init__.py").is_file()


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_between_the_packages_go_one_way(package):
    for file in sources(package):
        others = imports(file) & set(PACKAGES) - {package}
        assert others <= MAY_IMPORT[package], f"{file} imports {others - MAY_IMPORT[package]}"


def test_kernels_import_torch_and_triton_only():
    for file in sources("mamba_kernels"):
        allowed = {"torch", "triton", "mamba_kernels"} | sys.stdlib_module_names
        assert imports(file) <= allowed, f"{file} imports {imports(file) - allowed}"


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_imports_click(package):
    # Typer carries its own, and an installed one is another.
    for file in sources(package):
        assert "click" not in imports(file), file


@pytest.mark.parametrize("package", ["mamba_cli", "mamba_commands"])
def test_a_triton_kernel_is_imported_by_its_operation_alone(package):
    for file in sources(package):
        assert "_triton import" not in file.read_text(encoding="utf-8"), file
        assert "triton" not in imports(file), file


def test_transformers_works_from_the_root():
    code = "from transformers import Mamba2ForCausalLM"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_operations_are_found_in_the_package_whatever_was_imported_before():
    import mamba_kernels

    for name in mamba_kernels.__all__:
        importlib.import_module(f"mamba_kernels.{mamba_kernels._HOMES[name]}")
        operation = getattr(mamba_kernels, name)
        assert callable(operation) and operation.__name__ == name
