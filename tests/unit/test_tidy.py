"""House rules that a linter does not know (ARCHITECTURE.md, "Rules")."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from qim.config.parameters import parameter_names
from qim.errors import Detail, ErrorCode
from qim.obs import metrics
from qim.protocol import qim_pb2
from qim.protocol.opcodes import STREAM_OF, UPSTREAM, InternalOpcode, Opcode

ROOT = Path(__file__).parents[2]
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 600
LUA_HEADER = ("Purpose", "KEYS", "ARGV", "RETURN", "Atomicity", "Complexity")
GENERATED = {"qim_pb2.py"}
TESTED_THROUGH = {
    # declarations: the contract suites and machines are their tests
    "qim/stores/api.py", "qim/commit_log/api.py", "qim/registry/api.py", "qim/backplane/api.py",
    "qim/runtime/role.py", "qim/config/shapes.py",
    # the opcode table is checked here
    "qim/protocol/opcodes.py",
    # one call
    "qim/__main__.py",
}  # fmt: skip
TESTED_BY = {
    # both implementations of a contract run in one suite
    "qim/stores/memory_mailbox.py": "contract/test_mailbox_store.py",
}
BANNED_FILE_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|misc|managers?)(_|$)")
BANNED_WORDS = re.compile(
    r"\b(TODO|FIXME|XXX|HACK|phase [0-9]|milestone|[a-z]+Manager|Utils?|Helpers?|issue #?\d+)\b|#\d{1,4}\b"
)
NEEDS_A_REASON = re.compile(r"pytest\.mark\.(skip|xfail)|pytest\.skip\(|unittest\.skip")


def _sources(*folders: str, suffix: str = ".py") -> list[Path]:
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob(f"*{suffix}") if path.name not in GENERATED
    )


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


MODULES = _sources("qim")
PYTHON = [*MODULES, *_sources("tests")]
LUA = _sources("qim", suffix=".lua")


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def test_functions_are_short() -> None:
    long = [
        f"{_name(path)}: {name} has {lines} lines"
        for path in PYTHON
        for name, lines in _functions(path)
        if lines > FUNCTION_LINES_MAX
    ]
    assert not long, long


def test_modules_are_short() -> None:
    long = [_name(path) for path in [*PYTHON, *LUA] if len(path.read_text().splitlines()) > MODULE_LINES_MAX]
    assert not long, long


def test_every_module_has_a_test_file() -> None:
    tests = {path.relative_to(ROOT / "tests") for path in _sources("tests") if path.name.startswith("test_")}
    missing = [_name(path) for path in MODULES if not _is_tested(path, {str(test) for test in tests})]
    assert not missing, "\n".join(missing)


def _is_tested(path: Path, tests: set[str]) -> bool:
    """`qim/a/b/c.py` is tested by tests/<suite>/a/b/test_c.py, tests/<suite>/a/test_b_c.py or .../a/b/test_b.py."""
    name = _name(path)
    parts = list(path.relative_to(ROOT / "qim").with_suffix("").parts)
    if path.name == "__init__.py" or name in TESTED_THROUGH:
        return True
    if name in TESTED_BY:
        return TESTED_BY[name] in tests
    *folders, module = parts
    wanted = {"/".join([*folders[:cut], f"test_{'_'.join([*folders[cut:], module])}.py"]) for cut in range(len(parts))}
    return any(test.endswith("/" + one) for test in tests for one in wanted)


def test_every_public_definition_is_described() -> None:
    bare = [
        f"{_name(path)}: {node.name}"
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
        and node.end_lineno is not None
        and node.end_lineno - node.lineno > 3
    ]
    assert not bare, bare


def test_every_module_says_what_it_is() -> None:
    silent = [
        _name(path) for path in MODULES if path.read_text() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent, silent


def test_file_names_say_something() -> None:
    vague = [_name(path) for path in [*PYTHON, *LUA] if BANNED_FILE_NAMES.search(path.stem)]
    assert not vague, vague


def test_no_banned_words() -> None:
    texts = [*PYTHON, *LUA, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile"]
    found = [
        f"{_name(path)}:{number}: {match.group()}"
        for path in texts
        if path.name != "test_tidy.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := BANNED_WORDS.search(line))
    ]
    assert not found, found


def test_no_test_is_skipped() -> None:
    found = [_name(path) for path in _sources("tests") if path.name != "test_tidy.py" and _skips(path)]
    assert not found, found


def _skips(path: Path) -> bool:
    return NEEDS_A_REASON.search(path.read_text()) is not None


@pytest.mark.parametrize("path", LUA, ids=_name)
def test_lua_header_is_complete(path: Path) -> None:
    header = "\n".join(line for line in path.read_text().split("\n\n")[0].splitlines() if line.startswith("--"))
    missing = [part for part in LUA_HEADER if not re.search(rf"^--\s*{part}\b", header, re.MULTILINE)]
    assert not missing, missing


@pytest.mark.parametrize("path", LUA, ids=_name)
def test_lua_neither_compares_text_nor_computes_with_large_numbers(path: Path) -> None:
    """String order follows the server's locale; numbers are doubles (DESIGN §7)."""
    text = path.read_text()
    assert "os.time" not in text
    assert "EXPIREAT" not in text or "expired" in text, "EXPIREAT into the past deletes: say how it is avoided"


def test_every_parameter_is_declared_once() -> None:
    text = (ROOT / "qim/config/defaults.toml").read_text()
    declared = Counter(re.findall(r"^(\w+) = ", text, re.MULTILINE))
    assert [name for name, times in declared.items() if times > 1] == []
    assert set(declared) == set(parameter_names())


def test_every_default_has_a_comment() -> None:
    text = (ROOT / "qim/config/defaults.toml").read_text()
    bare = re.findall(r"^(\w+) = (?!.*#)", text, re.MULTILINE)
    assert bare == []


def test_opcodes_are_unique_and_have_a_direction() -> None:
    opcodes = [*Opcode, *InternalOpcode]
    assert len({int(opcode) for opcode in opcodes}) == len(opcodes)
    assert set(Opcode) == UPSTREAM | {Opcode(opcode) for opcode in STREAM_OF}
    assert all(int(opcode) >= 0xF000 for opcode in InternalOpcode)


def test_every_opcode_has_a_body_in_the_schema() -> None:
    bodies = {"".join(word.capitalize() for word in opcode.name.split("_")) for opcode in Opcode}
    missing = sorted(bodies - set(qim_pb2.DESCRIPTOR.message_types_by_name))
    assert not missing, missing


def test_error_codes_equal_those_of_the_schema() -> None:
    wire = dict(qim_pb2.ErrorCode.items())
    assert wire.pop("ERROR_CODE_UNSPECIFIED") == 0
    assert wire == {code.name: int(code) for code in ErrorCode}


def test_details_are_unique() -> None:
    details = [value for name, value in vars(Detail).items() if name.isupper()]
    assert len(set(details)) == len(details)


def test_details_are_named_not_spelled() -> None:
    """A detail is written once, in the catalogue."""
    details = {value for name, value in vars(Detail).items() if name.isupper()}
    spelled = [
        f"{_name(path)}:{node.lineno}"
        for path in MODULES
        if path.name != "errors.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "detail" and isinstance(node.value, ast.Constant)
        if node.value.value in details
    ]
    assert not spelled, spelled


def test_metrics_are_declared_in_one_place() -> None:
    elsewhere = [
        _name(path)
        for path in MODULES
        if path.name != "metrics.py" and re.search(r"\b(Counter|Gauge|Histogram|Summary)\(\s*\"", path.read_text())
    ]
    assert not elsewhere, elsewhere


def test_always_zero_metrics_exist() -> None:
    metrics.PUSH_DROP_BY_PRIORITY_TOTAL.labels("control")
    series = {line.rpartition(" ")[0] for line in metrics.render().decode().splitlines() if not line.startswith("#")}
    assert series >= metrics.ALWAYS_ZERO, metrics.ALWAYS_ZERO - series


def test_every_dependency_says_what_it_is_needed_for() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = text.partition("dependencies = [")[2].partition("]\n")[0]
    lines = [line.strip() for line in block.splitlines() if line.strip()]
    assert all(lines[at].startswith("# needed for:") for at in range(0, len(lines), 2)), lines
    assert all(lines[at].startswith('"') for at in range(1, len(lines), 2)), lines


def test_dependencies_are_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [name for extra in project["optional-dependencies"].values() for name in extra]
    locked = {line.partition("==")[0].lower() for line in (ROOT / "requirements-dev.lock").read_text().splitlines()}
    missing = [
        name
        for name in wanted
        if re.split(r"[=<>\[]", name)[0].lower().replace("-", "_") not in {one.replace("-", "_") for one in locked}
    ]
    assert not missing, missing


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    """`make proto` makes exactly what is committed."""
    schema = ROOT / "qim/protocol"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{schema}", f"--python_out={tmp_path}"]
    subprocess.run([*command, f"--pyi_out={tmp_path}", "qim.proto"], check=True)
    for name in ("qim_pb2.py", "qim_pb2.pyi"):
        assert (tmp_path / name).read_bytes() == (schema / name).read_bytes(), f"{name} is stale: make proto"
