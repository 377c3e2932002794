"""The installed releases have the defects that docs/upstream.md lists, no more and no fewer; or a workaround can go."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from fla_versions import fla_directory
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from upstream_runs import SCRIPTS, Run, run

REPOSITORY = Path(__file__).resolve().parents[2]
PLUGIN = REPOSITORY / "plugin" / "fla_safe"
NEEDED = ("fla", "mcore_bridge", "megatron", "triton")
pytestmark = pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason=f"needs {', '.join(NEEDED)}")

PAGE = (REPOSITORY / "docs" / "upstream.md").read_text()

FLA = ("torch", "fla", "fla.ops.gated_delta_rule", "fla.modules.fused_norm_gate")
MEGATRON = ("megatron.core.ssm.gated_delta_net", "megatron.core.distributed.finalize_model_grads")


@dataclass(frozen=True, slots=True)
class Row:
    """One defect in the page's table."""

    command: str
    package: str
    versions: SpecifierSet
    places: tuple[tuple[str, str], ...]
    condition: str

    @classmethod
    def read(cls, line: str) -> "Row":
        script, package, has, _, where, condition = (cell.strip() for cell in line.strip("| ").split(" | "))
        places = tuple(re.findall(r"`([\w/]+\.py)`(?: \(`(\w+)`\))?", where))
        versions = SpecifierSet(has.strip("`"), prereleases=True)
        return cls(script.strip("`"), package, versions, places, condition)

    def judge(self, version: Version, verdict: str) -> str | None:
        """What is wrong with the table when a release gives this verdict, None if nothing."""
        # A local build (2.11.0+cu130) has what its release has.
        has_it = Version(version.public) in self.versions
        if has_it and verdict == "gone":
            where = ", ".join(f"plugin/fla_safe/{file}" + (f" ({name})" if name else "") for file, name in self.places)
            return (
                f"{self.package} {version} no longer has the defect that scripts/upstream/{self.command} shows. "
                f"Delete the workaround at {where} (when: {self.condition}), or, as long as older releases are "
                f"supported, write in docs/upstream.md that {version} does not have it"
            )
        if not has_it and verdict == "present":
            return (
                f"{self.package} {version} has the defect that scripts/upstream/{self.command} shows, "
                f"but docs/upstream.md says that only {self.versions} does: correct the table"
            )
        return None


CONTROL = "gdn_norm_gradients.py megatron_core sequence_parallel"
"""The same script on a layer that is right."""

ROWS = [Row.read(line) for line in PAGE.splitlines() if re.match(r"\| `\w+\.py[ `]", line)]


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """Every script's run against the installed releases."""
    commands = [*(row.command for row in ROWS), CONTROL]
    alone = [c for c in commands if c.startswith("fla_half_installed")]
    interpreted = [c for c in commands if c.startswith("triton_interpreter")]
    rest = [c for c in commands if c not in alone + interpreted]
    with ThreadPoolExecutor(2) as pool:
        parts = [
            pool.submit(run, rest, (*FLA, *MEGATRON)),
            pool.submit(run, interpreted, ("torch", "triton"), {"TRITON_INTERPRET": "1"}),
            pool.submit(run, alone),
        ]
        return {command: result for part in parts for command, result in part.result().items()}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.command.replace(".py", "").replace(" ", "-"))
def test_the_installed_release_is_as_the_table_says(row: Row, runs: dict[str, Run]) -> None:
    done = runs[row.command]
    verdict = done.verdict
    assert not done.ours, f"it imported {done.ours}"
    if verdict == "cannot tell":
        pytest.skip(done.output.strip().splitlines()[-1])
    complaint = row.judge(Version(metadata.version(row.package)), verdict)
    assert complaint is None, f"{complaint}\n{done.output}"


def test_only_what_needs_a_gpu_cannot_be_told_without_one(runs: dict[str, Run]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert [c for c, done in runs.items() if done.verdict == "cannot tell"] == ["fla_hopper_dqkwg.py"]


def test_a_script_that_is_asked_for_no_case_it_knows_cannot_tell() -> None:
    """Any other end, a traceback among them, has the status of "gone"."""
    for script, preload in (("gdn_norm_gradients.py", MEGATRON), ("triton_interpreter.py", ("torch", "triton"))):
        commands = [script, f"{script} other", f"{script} mcore_bridge tensor_parallel more"]
        environ = {"TRITON_INTERPRET": "1"} if "triton" in preload else {}
        assert {done.verdict for done in run(commands, preload, environ).values()} == {"cannot tell"}


def test_the_probe_is_seen_in_the_release_that_has_it() -> None:
    """The installed FLA is newer; a script that never answers "present" would go unnoticed."""
    place = fla_directory("0.5.1")
    if place is None:
        pytest.skip("fla-core 0.5.1 is not there and cannot be fetched")
    commands = [row.command for row in ROWS if row.package == "fla-core" and "half_installed" not in row.command]
    for command, done in run(commands, FLA, path=str(place)).items():
        row = next(r for r in ROWS if r.command == command)
        assert "fla 0.5.1" in done.output
        assert row.judge(Version("0.5.1"), done.verdict) is None, done.output


def test_a_layer_with_right_gradients_is_found_right(runs: dict[str, Run]) -> None:
    assert runs[CONTROL].verdict == "gone", runs[CONTROL].output


@pytest.mark.parametrize(
    ("version", "verdict", "words"),
    [
        ("1.2.0", "gone", "Delete the workaround at plugin/fla_safe/a.py (thing), plugin/fla_safe/b.py (when: it is"),
        ("1.2.0+cu130", "gone", "Delete the workaround"),
        ("1.3.0", "present", "correct the table"),
        ("1.2.0", "present", None),
        ("1.3.0", "gone", None),
    ],
)
def test_complaints(version: str, verdict: str, words: str | None) -> None:
    row = Row.read("| `x.py y` | thing | `>=1.0,<1.3` | 1.0 | `a.py` (`thing`), `b.py` | it is mended |")
    complaint = row.judge(Version(version), verdict)
    assert (complaint is None) if words is None else (words in str(complaint))


def test_table_and_folder_list_the_same_scripts() -> None:
    assert {row.command.split()[0] for row in ROWS} == {path.name for path in SCRIPTS.glob("*.py")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.command)
def test_workarounds_are_where_the_table_says(row: Row) -> None:
    assert row.places
    assert row.condition
    for file, name in row.places:
        assert re.search(rf"\b{name}\b", (PLUGIN / file).read_text()), f"{file}: {name}"


def test_every_file_that_names_an_upstream_issue_is_on_the_page() -> None:
    mention = re.compile(
        r"(issues?|requests?) \d{2,}|#\d{2,}|issues/\d|[Dd]elete (this |the entry )?(when|together)|can go when"
    )
    # Reports and reproductions name issues without working around them.
    floors = [
        p for room in ("cpu", "doctor", "gdn", "megatron", "runtime", "swift") for p in (PLUGIN / room).rglob("*.py")
    ]
    files = {path.relative_to(PLUGIN).as_posix() for path in floors if mention.search(path.read_text())}
    assert len(files) > 8, "the search itself is broken"
    assert {file for file in files if f"`{file}`" not in PAGE} == set()
