"""docs/flags.md and docs/troubleshooting.md name every flag, variable, error and check of the source, and no others."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PLUGIN = REPOSITORY / "plugin" / "fla_safe"
FLAGS = (REPOSITORY / "docs" / "flags.md").read_text()
TROUBLE = (REPOSITORY / "docs" / "troubleshooting.md").read_text()

# How variables of the packages that we meet are called.
VARIABLE = re.compile(r"(?:CUDA|FLA|MASTER|NCCL|PYTORCH|SLURM|SWIFT|TORCH|TORCHDYNAMO|TRITON|USE)_[A-Z0-9_]+")


def trees() -> Iterator[tuple[Path, ast.Module]]:
    """Modules of the package; the stand-in for TransformerEngine is another package's shape."""
    for path in sorted(PLUGIN.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def strings(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def variables_in(tree: ast.Module) -> set[str]:
    """Names of environment variables: asked of something called environ, listed as such, or named like one."""
    found = {text for text in strings(tree) if VARIABLE.fullmatch(text)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="get" | "getenv" | "on" | "pop" | "setdefault")):
                asked = node.args[:1]
            case ast.Subscript(value=owner):
                asked = [node.slice]
            case ast.Compare(left=ast.Constant(), ops=[ast.In() | ast.NotIn()], comparators=[owner]):
                asked = [node.left]
            case _:
                continue
        if ast.unparse(owner).split(".")[-1] in {"environ", "env", "os"}:
            found |= {text for part in asked for text in strings(part) if re.fullmatch(r"[A-Z][A-Z0-9_]+", text)}
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("VARIABLES"):
            found |= {text for text in strings(node.value) if re.fullmatch(r"[A-Z][A-Z0-9_]+", text)}
    return found


def errors() -> set[str]:
    """Every class that derives from FlaSafeError, however indirectly."""
    bases = {
        node.name: {ast.unparse(base).split(".")[-1] for base in node.bases}
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"FlaSafeError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found - {"FlaSafeError"}


def rows(text: str) -> list[list[str]]:
    """Cells of every table row whose first cell holds names in backticks."""
    lines = [line.strip().strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in cells] for cells in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def documented(text: str, pattern: str) -> set[str]:
    return {name for cells in rows(text) for name in names(cells[0]) if re.fullmatch(pattern, name)}


def test_every_variable_that_the_package_knows_is_listed() -> None:
    known = set().union(*(variables_in(tree) for _, tree in trees()))
    assert {"RANK", "LSB_JOBID", "TRITON_HOME"} <= known, "the search itself is broken"
    assert known - documented(FLAGS, "[A-Z][A-Z0-9_]+") == set()


@pytest.mark.parametrize("cells", rows(FLAGS), ids=lambda cells: names(cells[0])[0].lstrip("-"))
def test_every_listed_name_is_in_the_file_that_is_said_to_read_it(cells: list[str]) -> None:
    assert len(cells) == 4, "name, default, meaning, file"
    text = (REPOSITORY / names(cells[3])[0]).read_text()
    for name in names(cells[0]):
        assert re.search(rf"\b{name.lstrip('-')}\b", text), name


def test_every_flag_is_listed_with_its_default() -> None:
    tree = ast.parse((PLUGIN / "swift" / "arguments.py").read_text())
    fields = {
        ast.unparse(node.target): next(k.value for k in node.value.keywords if k.arg == "default")
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call)
    }
    assert len(fields) >= 3, "the search itself is broken"
    listed = {names(cells[0])[0]: cells[1].strip("`") for cells in rows(FLAGS) if cells[0].startswith("`--")}
    defaults = {f"--{name}": str(ast.literal_eval(value)).lower() for name, value in fields.items()}
    assert listed == defaults


def test_every_error_is_explained_and_no_other() -> None:
    assert {"OffsetsError", "BundleDamagedError", "ArtifactSpaceError"} <= errors(), "the search itself is broken"
    assert documented(TROUBLE, r"\w+Error") == errors()


def test_every_check_of_the_doctor_is_explained_and_no_other() -> None:
    tree = ast.parse((PLUGIN / "doctor" / "checks.py").read_text())
    table = next(n for n in tree.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "CHECKS")
    checks = {ast.literal_eval(pair.elts[0]) for pair in table.value.elts}  # type: ignore[union-attr]
    assert len(checks) > 10
    assert documented(TROUBLE, "[a-z-]+") == checks


def test_links_between_documents_lead_somewhere() -> None:
    for page in (REPOSITORY / "docs").glob("*.md"):
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
