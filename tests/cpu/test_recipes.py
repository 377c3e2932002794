"""Every recipe: written from the table, sizes that fit its model, flags ms-swift knows, one line for bad input."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from recipe_runs import REPOSITORY, Bench, program

sys.path.insert(0, str(REPOSITORY / "scripts"))

import make_recipes
import recipe_cards

FOLDER = REPOSITORY / "recipes"
TABLE = make_recipes.read_table()
SCRIPTS = sorted(FOLDER.rglob("*.sh"))
REPORTED = "qwen3_5_35b_a3b/full_2x8.sh"
by_path = pytest.mark.parametrize("recipe", TABLE, ids=lambda recipe: str(recipe.path))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench.make(tmp_path)


@by_path
def test_the_script_is_what_the_table_says(recipe: make_recipes.Recipe) -> None:
    path = FOLDER / recipe.path
    assert path.read_text() == make_recipes.render(recipe), "run scripts/make_recipes.py"
    assert os.access(path, os.X_OK)


def test_no_generated_script_is_left_over() -> None:
    generated = {path for path in SCRIPTS if "Written by scripts/make_recipes.py" in path.read_text()}
    assert generated == {FOLDER / recipe.path for recipe in TABLE}


@by_path
def test_sizes_fit_the_model_and_the_gpus(recipe: make_recipes.Recipe) -> None:
    assert make_recipes.size_errors(recipe) == []
    assert recipe.micro_batches >= 1
    assert sum(make_recipes.gdn_layers_by_stage(recipe)) == recipe.model.layers * 3 // 4


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"tp": 3}, "GPUs 16 not divisible by TP x PP x CP 6"),
        ({"pp": 3}, "layers 40 not divisible by PP 3"),
        ({"ep": 16}, "GPUs 16 not divisible by PP x EP 32"),
        ({"tp": 32, "pp": 1}, "GDN key heads 16 not divisible by TP x CP 32"),
        ({"cp": 32}, "GDN value heads 32 not divisible by TP x CP 64"),
        ({"ep": 3}, "experts 256 not divisible by EP 3"),
        ({"global_batch": 100}, "global batch 100 not divisible by 2 x 4"),
    ],
    ids=lambda value: "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_sizes_that_do_not_fit_are_named(change: dict[str, int], error: str) -> None:
    reported = next(recipe for recipe in TABLE if str(recipe.path) == REPORTED)
    assert any(error in found for found in make_recipes.size_errors(replace(reported, **change)))


def test_the_reported_workload_is_the_reported_one(bench: Bench) -> None:
    """The sizes and switches that FLA issue 1072 names, and its 720 kernel calls."""
    command = bench.command(FOLDER / REPORTED)
    wanted = {
        "gdn_impl": "fla_safe",
        "tensor_model_parallel_size": "2",
        "pipeline_model_parallel_size": "2",
        "expert_model_parallel_size": "8",
        "context_parallel_size": "1",
        "packing": "true",
        "max_length": "14000",
        "micro_batch_size": "2",
        "global_batch_size": "128",
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": "1",
        "freeze_vit": "true",
        "freeze_aligner": "true",
        "optimizer_cpu_offload": "true",
        "optimizer_offload_fraction": "1.0",
    }
    for flag, value in wanted.items():
        assert command[command.index(f"--{flag}") + 1] == value, flag
    variables = bench.record()[0]
    assert (variables["NNODES"], variables["NPROC_PER_NODE"]) == ("2", "8")
    assert "720 GDN kernel calls" in (FOLDER / REPORTED).read_text()


# What the real classes make of the flags. Parsed, not instantiated: instantiation reads the model and starts Megatron.
PARSE = """
import json, sys
import swift.megatron.arguments as arguments
from transformers import HfArgumentParser
from swift.utils.utils import _patch_get_type_hints

with _patch_get_type_hints():
    parser = HfArgumentParser([arguments.MegatronSftArguments])
result = {}
for name, argv in json.load(sys.stdin).items():
    try:
        known, unknown = parser.parse_known_args(argv)
        result[name] = {"unknown": unknown, "values": {k: str(v) for k, v in vars(known).items()}}
    except SystemExit as error:
        result[name] = {"unknown": ["a value that the parser refuses"], "values": {}}
print(json.dumps(result))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="uses the CPU stand-in for TransformerEngine")
def test_the_real_parser_of_ms_swift_knows_every_flag(bench: Bench) -> None:
    commands = {str(recipe.path): bench.command(FOLDER / recipe.path) for recipe in TABLE}
    assert all(command[0] == "sft" for command in commands.values())
    tiny = bench.command(FOLDER / "tiny" / "train.sh", MODEL=bench.model(), GPUS="1", MASTER_PORT="1")
    jobs = {name: command[1:] for name, command in commands.items()}
    jobs |= {
        "tiny": tiny[1:],
        "misspelt": ["--gdn_impl", "fla_safe", "--pakcing", "true"],
        "bad": ["--gdn_guard", "no"],
    }
    environment = {name: value for name, value in os.environ.items() if name not in {"USE_MCORE_GDN", "RANK"}}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARSE],
        input=json.dumps(jobs),
        env=environment | {"FLA_SAFE_CPU": "1", "HF_HUB_OFFLINE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    parsed = json.loads(done.stdout.splitlines()[-1])
    assert parsed.pop("misspelt")["unknown"] == ["--pakcing", "true"]
    assert parsed.pop("bad")["unknown"]
    assert {name: job["unknown"] for name, job in parsed.items()} == {name: [] for name in parsed}
    for recipe in TABLE:
        values = parsed[str(recipe.path)]["values"]
        assert values["gdn_impl"] == "fla_safe"
        assert values["packing"] == "True"
        assert values["tensor_model_parallel_size"] == str(recipe.tp)
        assert values["sequence_parallel"] == str(recipe.tp > 1)
        assert values["expert_model_parallel_size"] == str(recipe.ep)


# What is wrong -> changed variables, part of the one line that says so.
REFUSALS: dict[str, tuple[dict[str, str | None], str]] = {
    "no data": ({"DATA": None}, "DATA: a JSONL file"),
    "no output": ({"OUTPUT": None}, "OUTPUT: a folder"),
    "data file missing": ({"DATA": "data/train.jsonl"}, "DATA=data/train.jsonl is neither a file nor a hub name"),
    "part of a data file missing": ({"DATA": "data/train.jsonl#5"}, "DATA=data/train.jsonl#5 is neither a file nor"),
    "data path mistyped": ({"DATA": "/no/such/data"}, "neither a file nor a hub name"),
    "data file empty": ({"DATA": "/dev/null"}, "not a readable file"),
    "model folder without config": ({"MODEL": "recipes"}, "holds no config.json"),
    "model path mistyped": ({"MODEL": "/no/such/model"}, "neither a folder nor a hub name"),
    "output not writable": ({"OUTPUT": "/proc/out"}, "cannot be made or written to"),
    "no megatron": ({"PATH": "/usr/bin:/bin"}, "no megatron command"),
    "autoload off": ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "TORCH_DEVICE_BACKEND_AUTOLOAD=0 hides --gdn_impl"),
    "GDN layers not Megatron's": ({"USE_MCORE_GDN": "0"}, "USE_MCORE_GDN=0"),
    "no address of the first node": ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
    "node rank too large": ({"NODE_RANK": "2"}, "NODE_RANK=2, but NNODES=2"),
    "node rank no number": ({"NODE_RANK": "one"}, "NODE_RANK=one is not a whole number"),
    "nodes no number": ({"NNODES": "two"}, "NNODES=two is not a whole number"),
    "leading zero": ({"NODE_RANK": "08"}, "NODE_RANK=08 is not a whole number"),
    "port too large": ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a whole number of 1 to 65535"),
    "number too large": ({"NPROC_PER_NODE": "9" * 20}, "99 is not a whole number"),
    "too few GPUs": ({"CUDA_VISIBLE_DEVICES": "0,1"}, "2 GPUs are visible"),
    "no GPU visible": ({"CUDA_VISIBLE_DEVICES": ""}, "0 GPUs are visible"),
    "GPUs after one that is none": ({"CUDA_VISIBLE_DEVICES": "0,-1,1,2,3,4,5,6"}, "1 GPUs are visible"),
    "world not divisible by TP x PP": ({"NNODES": "1", "NPROC_PER_NODE": "2"}, "cannot be divided by TP2 x PP2 x CP1"),
    "world not divisible by EP": ({"NNODES": "1", "NPROC_PER_NODE": "8"}, "cannot be divided by PP2 x EP8"),
    "batch not divisible by replicas": ({"NNODES": "6"}, "global batch 128 cannot be divided"),
}


@pytest.mark.parametrize("wrong", REFUSALS)
def test_bad_input_is_one_line_before_anything_starts(bench: Bench, wrong: str) -> None:
    changes, line = REFUSALS[wrong]
    done = bench.bash(str(FOLDER / REPORTED), **changes)
    assert done.returncode != 0
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    with pytest.raises(FileNotFoundError):
        bench.record()


@pytest.mark.parametrize(
    ("flags", "nodes", "line"),
    [
        (["--expert_model_parallel_size", "4"], "3", "global batch 128 cannot be divided by micro-batch 2 x 6"),
        (["--expert-model-parallel-size=4", "--global_batch_size", "96"], "3", ""),
        (["--tensor_model_parallel_size", "4", "--tensor_model_parallel_size", "3"], "2", "TP3 x PP2 x CP1"),
        (["--micro_batch_size", "two"], "2", "micro=two is not a whole number"),
    ],
    ids=["batch", "fits", "the last one counts", "no number"],
)
def test_sizes_are_checked_as_flags_change_them(bench: Bench, flags: list[str], nodes: str, line: str) -> None:
    done = bench.bash(str(FOLDER / REPORTED), *flags, NNODES=nodes)
    assert (done.returncode == 0) == (not line), done.stderr
    assert line in done.stderr


# What is wrong with a run of the tiny recipe, which starts without a list of nodes.
TINY: dict[str, tuple[dict[str, str | None], str]] = {
    "model missing": ({"MODEL": "/no/such/model"}, "MODEL=/no/such/model is neither a folder nor"),
    "data missing": ({"DATA": "none.jsonl"}, "DATA=none.jsonl is neither a file nor"),
    "GPUS no number": ({"GPUS": "all"}, "GPUS=all is not a whole number"),
    "sizes": ({"TP": "4", "GPUS": "2"}, "1 x 2 = 2 GPUs cannot be divided by TP4 x PP1 x CP1"),
    "TP no number": ({"TP": "two"}, "tp=two is not a whole number"),
    "processes": ({"NPROC_PER_NODE": "3"}, "1 x 3 = 3 GPUs cannot be divided by TP2 x PP2 x CP1"),
}


@pytest.mark.parametrize("wrong", TINY)
def test_bad_input_of_the_tiny_recipe_is_one_line(bench: Bench, wrong: str) -> None:
    changes, line = TINY[wrong]
    done = bench.bash(str(FOLDER / "tiny" / "train.sh"), **{"MODEL": bench.model(), "GPUS": "0", **changes})
    assert done.returncode != 0
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_part_of_a_data_file_is_a_data_file(bench: Bench) -> None:
    data = f"{bench.folder / 'train.jsonl'}#500"
    command = bench.command(FOLDER / REPORTED, DATA=data)
    assert command[command.index("--dataset") + 1] == data


def test_an_empty_data_file_is_refused(bench: Bench) -> None:
    (bench.folder / "train.jsonl").write_text("")
    done = bench.bash(str(FOLDER / REPORTED))
    assert done.returncode != 0
    assert "is empty" in done.stderr


def test_no_driver_is_refused(bench: Bench) -> None:
    program(bench.folder / "bin" / "nvidia-smi", "exit 9")
    assert "GPUs are visible" in bench.bash(str(FOLDER / REPORTED)).stderr


def test_own_flags_come_last_and_own_variables_stay(bench: Bench) -> None:
    model = bench.model()
    command = bench.command(
        FOLDER / REPORTED, "--gdn_impl", "default", MODEL=model, EPOCHS="3", PYTORCH_CUDA_ALLOC_CONF="x:1"
    )
    assert command[-2:] == ["--gdn_impl", "default"]
    assert command[command.index("--model") + 1] == model
    assert command[command.index("--num_train_epochs") + 1] == "3"
    variables = bench.record()[0]
    assert variables["PYTORCH_CUDA_ALLOC_CONF"] == "x:1"
    assert variables["MODELSCOPE_CACHE"] == str(bench.folder / "out" / "cache")


def test_one_node_needs_no_address(bench: Bench) -> None:
    bench.command(FOLDER / "qwen3_5_35b_a3b" / "full_1x8.sh", MASTER_ADDR=None)
    variables = bench.record()[0]
    assert (variables["MASTER_ADDR"], variables["NODE_RANK"], variables["MODELSCOPE_CACHE"]) == ("127.0.0.1", "0", "")


def test_slurm_starts_the_recipe_on_every_node(bench: Bench) -> None:
    program(bench.folder / "bin" / "scontrol", 'echo "node7"; echo "node8"')
    # Runs the second of two tasks, with what srun would set.
    program(bench.folder / "bin" / "srun", 'while [[ $1 == --* ]]; do shift; done; SLURM_NODEID=1 exec "$@"')
    slurm = {
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "40123",
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
    }
    done = bench.bash("recipes/slurm.sh", f"recipes/{REPORTED}", "--seed", "1", MASTER_ADDR=None, **slurm)
    assert done.returncode == 0, done.stderr
    variables, command = bench.record()
    assert (variables["NNODES"], variables["NODE_RANK"], variables["MASTER_ADDR"]) == ("2", "1", "node7")
    assert variables["MASTER_PORT"] == "20123"
    assert command[-2:] == ["--seed", "1"]
    for arguments, line in ((["recipes/no.sh"], "there is no recipe"), ([], "no recipe given")):
        refused = bench.bash("recipes/slurm.sh", *arguments, **slurm)
        assert refused.returncode != 0
        assert line in refused.stderr
    assert "not inside a Slurm job" in bench.bash("recipes/slurm.sh", f"recipes/{REPORTED}").stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_the_shell_can_read_it_and_every_variable_is_set_or_documented(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0
    text = script.read_text()
    shared = [FOLDER / "environment.sh", FOLDER / "launch.sh"]
    family = text if "/../launch.sh" not in text else "\n".join([text, *(path.read_text() for path in shared)])
    if script in shared:
        family = "\n".join([*(path.read_text() for path in shared), (FOLDER / REPORTED).read_text()])
    # A default or a message in the expansion means that the variable may come from outside.
    outside = set(re.findall(r"\$\{([A-Za-z_]\w*):?[-?=+]", family))
    assigned = set(re.findall(r"(?:^|[\s;&(])([A-Za-z_]\w*)=", family, re.MULTILINE))
    assigned |= {name for line in re.findall(r"\blocal ((?:\w+ ?)+)$", family, re.MULTILINE) for name in line.split()}
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    used = set(re.findall(r"\$\{?!?([A-Za-z_]\w*)", code))
    given = {"BASH_SOURCE", "HOME", "PATH"} | {name for name in used if name.startswith("SLURM_")}
    assert used <= outside | assigned | given
    if script.parent != FOLDER:
        documented = " ".join(line for line in text.splitlines() if line.startswith("#"))
        documented += (FOLDER / "environment.sh").read_text() + (REPOSITORY / "docs" / "flags.md").read_text()
        assert {name for name in outside & used if name not in documented} == set()


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in SCRIPTS} - {FOLDER}), ids=lambda path: str(path.relative_to(FOLDER))
)
def test_every_recipe_has_a_header_and_a_card(folder: Path) -> None:
    card = recipe_cards.read_card(folder / "card.yaml")
    scripts = {path.name for path in folder.glob("*.sh")}
    assert scripts <= {entry.recipe for entry in card.entries}
    for entry in card.entries:
        assert (folder / entry.recipe).is_file()
    for path in folder.glob("*.sh"):
        text = path.read_text()
        assert "set -euo pipefail" in text
        for field in ("What:", "Hardware:", "Sizes:", "Expected:", "How long:", "Use:"):
            assert f"\n# {field}" in text


@by_path
def test_the_card_matches_the_table(recipe: make_recipes.Recipe) -> None:
    entries = recipe_cards.read_card(FOLDER / recipe.model.key / "card.yaml").entries
    mine = [entry for entry in entries if entry.recipe == recipe.path.name]
    calls = re.search(r"(\d+(?: or \d+)*) GDN kernel calls", (FOLDER / recipe.path).read_text())
    assert calls is not None
    assert mine
    assert all(f"{calls[1]} GDN kernel calls" in entry.expected for entry in mine)


GOOD = {"recipe": "a.sh", "hardware": "8 GPUs", "status": "not verified", "command": "bash a.sh", "expected": "falls"}
RUN = {"date": "2026-11-30", "versions": {"torch": "2.11.0"}, "result": "fell"}


@pytest.mark.parametrize(
    "entry",
    [
        GOOD | {"status": "verified"},
        GOOD | RUN,
        GOOD | {"status": "verified", **RUN, "versions": {}},
        GOOD | {"status": "probably"},
        GOOD | {"speed": "fast"},
        GOOD | {"command": "bash b.sh"},
        GOOD | {"status": "verified", **RUN, "date": "yesterday"},
    ],
    ids=["no evidence", "evidence", "no versions", "status", "unknown field", "other command", "date"],
)
def test_a_card_that_claims_too_much_is_refused(entry: dict[str, object]) -> None:
    recipe_cards.Card.model_validate({"entries": [GOOD, GOOD | {"hardware": "16 GPUs"} | {"status": "verified"} | RUN]})
    with pytest.raises(ValidationError):
        recipe_cards.Card.model_validate({"entries": [entry]})
    with pytest.raises(ValidationError, match="two entries"):
        recipe_cards.Card.model_validate({"entries": [GOOD, GOOD]})


def test_the_page_lists_every_recipe_with_its_sizes() -> None:
    page = (REPOSITORY / "docs" / "recipes.md").read_text()
    rows = {line.split("|")[1].strip(" `"): line for line in page.splitlines() if line.startswith("| `")}
    for model in dict.fromkeys(recipe.model for recipe in TABLE):
        mine = [recipe for recipe in TABLE if recipe.model == model]
        cells = [cell.strip() for cell in rows[model.key].split("|")]
        assert cells[3] == ", ".join(f"`{recipe.name}`" for recipe in mine)
        assert cells[4] == ", ".join(f"{recipe.tp} {recipe.pp} {recipe.ep}" for recipe in mine)
