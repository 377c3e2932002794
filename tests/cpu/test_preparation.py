"""`fla-safe warmup`: what it is asked to prepare, read from names and recipes; and what it refuses."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fla_safe.cli import app
from fla_safe.preparation.models import MODELS, UnknownModelError, heads_of
from fla_safe.preparation.recipe import Plan, read_recipe
from fla_safe.progress import progress_bar

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def test_names_and_heads_are_those_of_the_recipes() -> None:
    import tomllib

    table = tomllib.loads((RECIPES / "table.toml").read_text())["models"]
    for name, counts in table.items():
        assert (heads_of(name).key_heads, heads_of(name).value_heads) == (counts["key_heads"], counts["value_heads"])


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_named_model_can_be_sharded(name: str, ranks: int) -> None:
    shard = heads_of(name).shard(ranks)
    assert shard.key_heads * ranks == 16
    assert shard.value_heads % shard.key_heads == 0


def test_heads_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(UnknownModelError, match="over 3 ranks"):
        heads_of("qwen3_5_27b").shard(3)


def test_a_recipe_says_what_its_job_will_run() -> None:
    """Two packs of 14000 tokens lie in one row."""
    assert read_recipe(RECIPES / "qwen3_5_35b_a3b" / "full_2x8.sh") == Plan("qwen3_5_35b_a3b", 2, 28000, 1, True)


@pytest.mark.parametrize(
    ("flags", "packed", "tokens", "batch"),
    [
        ("--max_length 100", True, 300, 1),
        ("--max_length 100 --packing true", True, 300, 1),
        ("--max_length 100 --padding_free false", False, 100, 3),
        ("--max_length 100 --padding_free=false --packing true", True, 300, 1),
        ("--max_length 100 --packing true --packing_length 700", True, 2100, 1),
    ],
)
def test_rows_are_those_that_ms_swift_will_make(
    tmp_path: Path, flags: str, packed: bool, tokens: int, batch: int
) -> None:
    """As `freeze_kernels` reads them off ms-swift's own arguments; samples lie side by side by default."""
    script = tmp_path / "run.sh"
    script.write_text(f"megatron sft --micro_batch_size 3 {flags}\n")
    plan = read_recipe(script)
    assert (plan.packed, plan.tokens, plan.batch) == (packed, tokens, batch)


def test_every_written_recipe_can_be_read() -> None:
    scripts = list(RECIPES.glob("qwen*/*.sh"))
    assert len(scripts) > 8
    for script in scripts:
        plan = read_recipe(script)
        heads_of(plan.model).shard(plan.ranks)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("megatron sft --micro_batch_size 1", "does not say --max_length"),
        ('megatron sft --max_length "$LENGTH"', "says --max_length"),
    ],
    ids=["missing", "a variable"],
)
def test_a_script_without_plain_values_is_refused(tmp_path: Path, text: str, seen: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    with pytest.raises(UnknownModelError, match=seen):
        read_recipe(script)


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ([], "no shape was named"),
        (["--model", "gpt2"], "model 'gpt2'"),
        (["--heads", "16,32"], "--heads 16,32"),
        (["--model", "qwen3_5_9b", "--tp", "3"], "over 3 ranks"),
        (["--model", "qwen3_5_9b", "--dtype", "int8"], "--dtype int8"),
        (["--model", "qwen3_5_9b", "--kernel", "cudnn"], "--gdn_kernel 'cudnn'"),
        (["--model", "qwen3_5_9b", "--start", "/no/such.fsb"], "/no/such.fsb"),
        (["--recipe", "/no/such.sh"], "/no/such.sh"),
    ],
)
def test_a_wrong_question_is_one_named_error_and_nothing_is_written(
    tmp_path: Path, arguments: list[str], seen: str
) -> None:
    out = tmp_path / "out.fsb"
    result = CliRunner().invoke(app, ["warmup", str(out), *arguments])
    assert result.exit_code == 2
    assert seen in result.output
    assert "to do:" in result.output
    assert not out.exists()


@pytest.mark.parametrize("name", ["file/out.fsb", "file/out.json", "folder"])
def test_a_place_that_cannot_be_written_is_said_before_anything_is_tuned(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    result = CliRunner().invoke(app, ["warmup", str(tmp_path / name), "--model", "qwen3_5_9b"])
    assert result.exit_code == 2
    assert "BundleError: cannot write" in result.output
    assert not list((tmp_path / "folder").iterdir())


def test_a_terminal_shows_the_kernel_and_a_file_gets_lines() -> None:
    told: list[str] = []
    with progress_bar(told.append, Console(file=io.StringIO())) as say:
        say("tuned kernel_a")
    assert told == ["tuned kernel_a"]
    screen = io.StringIO()
    with progress_bar(told.append, Console(file=screen, force_terminal=True, width=120)) as say:
        say("checking kernel_b")
    assert "checking kernel_b" in screen.getvalue()
    assert len(told) == 1


def test_shipped_tables_are_whole_and_are_found_by_jobs() -> None:
    from fla_safe.runtime.tuning.decisions import DecisionTable
    from fla_safe.tables import shipped_tables

    files = shipped_tables()
    assert files
    for file in files:
        table = DecisionTable.load(file, source="shipped")
        assert len(table) > 0
        parts = (table.stamp.device.split()[-1].lower(), f"fla-{table.stamp.fla}", f"triton-{table.stamp.triton}")
        assert file.stem == "_".join(parts)
        for key in table:
            assert key.kernel.startswith("fla.")
            assert table.entry(key).median_us, "measured, not made up"


def test_the_doctor_and_jobs_look_for_tables_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from fla_safe.doctor import checks
    from fla_safe.runtime.tuning.decisions import DecisionTable
    from fla_safe.tables import shipped_tables

    stamp = DecisionTable.load(shipped_tables()[0]).stamp
    found = checks.shipped_table(SimpleNamespace(stamp=stamp))  # type: ignore[arg-type]
    assert found.level == "ok"
    assert shipped_tables()[0].name in found.seen
