"""The rules of the house that a reader would otherwise have to check: imports, pins, sizes, places, skips."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_LINES = 400
PINS = ("cpu.txt", "cpu-nodeps.txt", "dev.txt")


def repository_files() -> list[Path]:
    """Files git tracks, and new ones it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [ROOT / name for name in names if name]
    return [path for path in files if path.is_file() and not path.is_symlink()]


def texts(*folders: str, suffix: str = "") -> Iterator[tuple[str, str]]:
    """(name, text) of text files below folders, or of all. This file is left out: it spells what it forbids."""
    for path in repository_files():
        name = path.relative_to(ROOT).as_posix()
        if path == Path(__file__) or not name.endswith(suffix):
            continue
        if folders and not name.startswith(folders):
            continue
        try:
            yield name, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def matching_lines(pattern: str, files: Iterator[tuple[str, str]]) -> list[str]:
    """`name:line: text` of every line that matches."""
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in files
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]


def imported_roots(*folders: str) -> dict[str, str]:
    """Top-level names imported below folders, each with one file that does it; standard library left out."""
    found: dict[str, str] = {}
    for name, text in texts(*folders, suffix=".py"):
        for node in ast.walk(ast.parse(text)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            found.update({module.split(".")[0]: name for module in modules})
    return {root: name for root, name in found.items() if root not in sys.stdlib_module_names}


def pinned(*files: str) -> dict[str, str]:
    """Normalised distribution name -> the rest of its line, for exact pins."""
    pins: dict[str, str] = {}
    for file in files:
        for line in (ROOT / "requirements" / file).read_text(encoding="utf-8").splitlines():
            requirement = line.split("#")[0].strip()
            if requirement:
                name, exact, version = requirement.partition("==")
                assert exact and version, f"{file}: pins are exact, got {requirement!r}"
                pins[normalised(name)] = version
    return pins


def normalised(distribution: str) -> str:
    """A distribution's name as indexes compare it, without extras."""
    return re.sub(r"[-_.]+", "-", distribution.split("[")[0]).lower()


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_kernels_import_only_torch_and_triton() -> None:
    assert set(imported_roots("kernels/")) <= {"torch", "triton", "megatron_rl_kernels"}


def test_no_file_names_a_machine_or_an_index() -> None:
    machine_paths = r"(^|[\s\"'`(=:])/(root|home/\w|Users/\w|work|opt/\w)(/|\b)"
    index_hosts = (
        r"(pypi|pythonhosted|download\.pytorch|registry\.npmjs|anaconda)\.(org|com)|--(extra-)?index-url|--find-links"
    )
    found = matching_lines(f"{machine_paths}|{index_hosts}", texts())
    assert not found, "\n".join(found)


def test_requirements_are_exact_pins_without_addresses() -> None:
    found = matching_lines(r"https?://|file:|git\+|^-|\s@\s", texts("requirements/"))
    assert not found, "\n".join(found)
    pinned("gpu.txt")
    names = [name for file in PINS for name in pinned(file)]
    assert sorted(set(names)) == sorted(names), "each distribution is pinned in one file"


def test_every_imported_distribution_is_pinned() -> None:
    providers = packages_distributions()
    pins = pinned(*PINS)
    own = {"megatron_rl", "megatron_rl_kernels"}
    for root, name in imported_roots("megatron_rl/", "kernels/").items():
        # Transformer Engine and Triton are imported on GPU hosts only.
        if root in own or root in {"transformer_engine", "triton"}:
            continue
        distributions = {normalised(distribution) for distribution in providers.get(root, [root])}
        assert distributions & set(pins), f"{name} imports {root}, which no file in requirements/ pins"


def test_extras_and_install_requirements_are_pinned() -> None:
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    listed = re.search(r"install_requires=\[(.*?)\]", text, re.DOTALL)
    assert listed
    names = {normalised(re.split(r"[><=]", name)[0]) for name in re.findall(r'"([^"]+)"', listed[1])}
    assert names <= set(pinned(*PINS))


def test_source_files_stay_short() -> None:
    lengths = {name: len(text.splitlines()) for name, text in texts("megatron_rl/", "kernels/", suffix=".py")}
    long = {name: length for name, length in lengths.items() if length >= MAX_LINES}
    assert not long, f"split these: {long}"


def test_only_gpu_tests_are_skipped() -> None:
    skips = r"(mark\.|pytest\.|unittest\.|\bself\.|@)(skip|skipif|xfail|skipTest|importorskip)\b"
    elsewhere = ((name, text) for name, text in texts("tests/") if name != "tests/conftest.py")
    outside_gpu = ((name, text) for name, text in elsewhere if not name.startswith("tests/gpu/"))
    found = matching_lines(skips, outside_gpu)
    assert not found, "\n".join(found)


def test_test_folders_are_no_packages_and_file_names_are_unique() -> None:
    names = [Path(name).name for name, _ in texts("tests/", suffix=".py") if Path(name).name != "conftest.py"]
    assert "__init__.py" not in names
    assert sorted(set(names)) == sorted(names)


def test_python_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert project["ruff"]["target-version"] == "py311"
    assert project["pyright"]["pythonVersion"] == "3.11"
    assert 'python_requires=">=3.11,<3.12"' in (ROOT / "setup.py").read_text(encoding="utf-8")
