"""The flag in ms-swift's real argument classes, and every way in which it fails closed."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="uses the CPU stand-in for TransformerEngine")


def run(code: str, **environment: str) -> str:
    """Output of a fresh interpreter in which ms-swift and mcore-bridge import."""
    env = {name: value for name, value in os.environ.items() if name not in {"USE_MCORE_GDN", "RANK", "WORLD_SIZE"}}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env=env | {"FLA_SAFE_CPU": "1", "HF_HUB_OFFLINE": "1"} | environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


COMMANDS = """
import tempfile
import swift.megatron.arguments as arguments
from transformers import HfArgumentParser
from swift.utils.utils import _patch_get_type_hints
for name in ("Sft", "Pretrain", "RLHF", "Export"):
    cls = getattr(arguments, f"Megatron{name}Arguments")
    with _patch_get_type_hints():
        parser = HfArgumentParser([cls])
    actions = {action.dest: action for action in parser._actions}
    action = actions["gdn_impl"]
    assert tuple(action.choices) == ("default", "fla_safe", "torch") and action.default == "default", action
    assert "--gdn_impl {default,fla_safe,torch}" in parser.format_help()
    assert actions["gdn_check"].metavar == "{off,first,every}" and actions["gdn_check"].default == "off"
    assert "--gdn_guard {off,warn,strict}" in parser.format_help()
print("known")

from swift.cli.main import parse_yaml_args
with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
    file.write("gdn_impl: fla_safe\\ngdn_guard: off\\ngdn_check: off\\n")
    file.flush()
    argv = [file.name, "--gdn-impl", "torch"]
    parse_yaml_args(argv)
given, rest = parser.parse_known_args(argv)
assert given.gdn_impl == "torch" and not rest, (given, rest)
from fla_safe.swift.model import _settings
settings = _settings(given)
print("yaml", settings.gdn_impl, settings.guard, settings.check)
"""

CHECK = """
import contextlib, types
import torch
from unittest import mock
from fla_safe.gdn.mixer import mixer
from fla_safe.megatron import bridge
from fla_safe.settings import SettingsError
from fla_safe.swift import callback, checking, freeze, model
from checked_layers import Model

meta = types.SimpleNamespace(model_type="qwen3_5")
nothing = lambda *args: None
done = []
took = lambda name, result=None: lambda *args: done.append(name) or result
swap = took("swap", contextlib.nullcontext(meta))
mock.patch.multiple(bridge, safe_layers=swap, verify_model=took("verify")).start()
mock.patch.multiple(freeze, freeze_kernels=took("freeze")).start()
mock.patch("fla_safe.megatron.packing.prepare_before_forward", took("prepare")).start()

def built(check, impl="fla_safe"):
    args = types.SimpleNamespace(gdn_impl=impl, gdn_check=check, megatron_model_meta=meta, callbacks=["print"])
    made = model._wrap(lambda args, config: [Model(2)])(args, None)
    return args, made[0].layers[1].self_attention

args, layer = built("off", "default")
assert args.callbacks == ["print"] and not done, done
untouched = lambda layer: layer.run_mixer is mixer and not {"forward", "run_mixer"} & set(vars(layer))
assert untouched(built("off")[1]) and not checking.watches()
assert done == ["swap", "verify", "prepare", "freeze"], done
print("every step")
try:
    built("every", "default")
except SettingsError as error:
    print(error)
args, layer = built("first")
assert not untouched(layer) and args.callbacks == ["fla_safe", "print"]
trainer = types.SimpleNamespace(args=args, state=types.SimpleNamespace(iteration=4))
steps = callback.GdnCallback(trainer)
steps.on_step_begin()
assert checking.watches()[0].step == 5 and not untouched(layer)
steps.on_step_end()
assert untouched(layer)
print("followed")
"""


LOGS = """
import json, sys, tempfile
from swift.megatron.callbacks.tensorboard import TensorboardCallback
from swift.megatron.callbacks.wandb import WandbCallback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

logged = {}
sys.modules["wandb"] = types.SimpleNamespace(
    init=nothing, log=lambda values, step=None, **_: logged.update(values), run=None, finish=nothing
)
counts = {"late_tunes": 3, "late_compiles": 0, "file_ops": 1, "syncs": 0, "served_general": 2}
steady = types.SimpleNamespace(runtime=types.SimpleNamespace(counters=lambda: counts))
mock.patch.object(callback, "steady_state", lambda: steady).start()
mock.patch("wandb.init", lambda **_: None).start()
with tempfile.TemporaryDirectory() as folder:
    args = types.SimpleNamespace(
        output_dir=folder, tensorboard_dir=None, tensorboard_queue_size=10, wandb_exp_name="x", wandb_project="y"
    )
    trainer = types.SimpleNamespace(args=args, state=types.SimpleNamespace(iteration=7, max_steps=7))
    callbacks = [callback.GdnCallback(trainer), TensorboardCallback(trainer), WandbCallback(trainer)]
    logs = {"loss": 1.0}
    for each in callbacks:
        each.on_log(logs)
    callbacks[1].writer.close()
    events = EventAccumulator(f"{folder}/runs")
    events.Reload()
    plotted = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]}
print("logs", json.dumps([logs, plotted, logged]))
"""

REPORT = """
import os
gather = lambda out, value: out.__setitem__(0, value)
first = lambda *args, **kwargs: 0
with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
    one = {"get_world_size": lambda: 1, "get_rank": first, "all_gather_object": gather}
    kinds = ("pipeline_model_parallel", "data_parallel", "tensor_model_parallel")
    places = {f"get_{kind}_rank": first for kind in kinds}
    patches.enter_context(mock.patch.multiple(callback.dist, **one))
    patches.enter_context(mock.patch.multiple(callback.mpu, **places))
    patches.enter_context(mock.patch.object(callback, "steady_state", lambda: None))
    state = types.SimpleNamespace(iteration=7, last_model_checkpoint=None)
    for own in (None, f"{folder}/own/name.json"):
        args = types.SimpleNamespace(gdn_impl="torch", gdn_report=own, output_dir=f"{folder}/out")
        trainer = types.SimpleNamespace(args=args, state=state, unwrapped_models=[])
        callback.GdnCallback(trainer).on_train_end()
        (written,) = [f"{root}/{file}" for root, _, files in os.walk(folder) for file in files]
        print("report", written.removeprefix(folder), json.load(open(written))["iterations"])
        os.remove(written)
"""

FREEZE = """
mock.patch.stopall()
from fla_safe.megatron.warmup import Workload
from fla_safe.settings import Settings

def job(**given):
    plain = {"micro_batch_size": 2, "padding_free": True, "max_length": 100, "packing_length": None, "rlhf_type": None}
    return types.SimpleNamespace(**(plain | given))

half = torch.float16
assert freeze.workload_of(job(), half) == Workload(200, 1, True, half)
assert freeze.workload_of(job(packing_length=80), half) == Workload(160, 1, True, half)
assert freeze.workload_of(job(padding_free=False), half) == Workload(100, 2, False, half)
for pairs in ("dpo", "rm"):
    assert freeze.workload_of(job(rlhf_type=pairs), half) == Workload(400, 1, True, half)
    assert freeze.workload_of(job(rlhf_type=pairs, padding_free=False), half) == Workload(100, 4, False, half)
print("rows")

class Full(Exception): ...
mock.patch("torch.cuda.is_available", lambda: True).start()
mock.patch("torch.OutOfMemoryError", Full).start()
mock.patch.object(freeze, "reach_steady_state", mock.Mock(side_effect=Full("40 GB"))).start()
model = types.SimpleNamespace(config=types.SimpleNamespace(params_dtype=half))
for exported in ("to_hf", "to_mcore"):
    freeze.freeze_kernels(job(**{exported: True}), [model], Settings("fla_safe"))
print("exported")
try:
    freeze.freeze_kernels(job(), [model], Settings("fla_safe"))
except freeze.WarmUpMemoryError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What the scripts print; in one process, because importing ms-swift takes long."""
    return run(COMMANDS + CHECK + LOGS + REPORT + FREEZE, PYTHONPATH=str(Path(__file__).parents[1])).splitlines()


def test_every_megatron_command_knows_the_flags(said: list[str]) -> None:
    assert "known" in said


def test_a_bare_off_in_a_yaml_file_is_off(said: list[str]) -> None:
    assert "yaml torch off off" in said


def test_a_model_is_swapped_verified_and_frozen_with_the_flag_and_left_alone_without(said: list[str]) -> None:
    assert "every step" in said


def test_the_check_is_put_on_built_models_and_follows_the_steps(said: list[str]) -> None:
    assert "followed" in said
    assert any("--gdn_check every with ms-swift's own GDN layers" in line for line in said)


def test_the_report_lies_where_the_flag_says_or_beside_the_checkpoints(said: list[str]) -> None:
    assert [line for line in said if line.startswith("report")] == [
        "report /out/gdn_report.json 7",
        "report /own/name.json 7",
    ]


def test_the_warm_up_knows_the_rows_of_every_kind_of_job(said: list[str]) -> None:
    assert "rows" in said


def test_an_export_does_not_warm_up(said: list[str]) -> None:
    assert "exported" in said


def test_rows_that_do_not_fit_in_the_warm_up_are_named(said: list[str]) -> None:
    assert any("rows of 200 tokens runs out of memory (40 GB)" in line and "--max_length" in line for line in said)


def test_counters_reach_the_log_tensorboard_and_wandb(said: list[str]) -> None:
    (line,) = [line for line in said if line.startswith("logs ")]
    logs, plotted, logged = json.loads(line.removeprefix("logs "))
    assert logs == {"loss": 1.0, "gdn/late_tunes": 3, "gdn/late_compiles": 0, "gdn/file_ops": 1, "gdn/syncs": 0}
    for seen in (plotted, logged):
        assert seen["train/gdn_late_tunes"] == 3
        assert {"train/gdn_late_compiles", "train/gdn_file_ops", "train/gdn_syncs", "train/loss"} <= set(seen)


SETUP = """
import contextlib, json, traceback, types
import torch
from packaging.specifiers import SpecifierSet
from fla_safe.megatron import bridge, versions
from fla_safe.settings import Settings
from mcore_bridge.model.register import get_model_meta

ours = Settings("fla_safe")
model_type = "qwen3_5"
"""

# What is wrong -> code that must raise, the error's name, a part of its message.
FAILURES = {
    "USE_MCORE_GDN=0": (
        "bridge.safe_layers(model_type, Settings('fla_safe', mcore_gdn=False))",
        "NoGdnLayersError",
        "USE_MCORE_GDN=0",
    ),
    "model type without GDN": ("bridge.safe_layers('gpt', ours)", "NoGdnLayersError", "no GDN layers"),
    "another GDN class": (
        "with unittest.mock.patch.object(get_model_meta(model_type).loader, 'gated_delta_net', torch.nn.Module):\n"
        "    bridge.safe_layers(model_type, ours)",
        "NoGdnLayersError",
        "whose GDN class is torch.nn.modules.module.Module",
    ),
    "a library other than mcore-bridge": (
        "from fla_safe.swift import model\n"
        "given = {'gdn_impl': 'fla_safe', 'bridge_backend': 'megatron-bridge', 'megatron_model_meta': None}\n"
        "model._wrap(None)(types.SimpleNamespace(**given), None)",
        "SettingsError",
        "--bridge_backend megatron-bridge",
    ),
    "built model without GDN": (
        "config = types.SimpleNamespace(linear_attention_freq=None, experimental_attention_variant=None)\n"
        "model = torch.nn.Module(); model.config = config\n"
        "bridge.verify_model([model], ours)",
        "NoGdnLayersError",
        "without GDN layers",
    ),
    "layer not replaced": (
        "stranger = torch.nn.Module(); stranger.A_log = stranger.dt_bias = torch.zeros(1)\n"
        "model = torch.nn.Module(); model.layer = stranger\n"
        "bridge.verify_model([model], ours)",
        "NotReplacedError",
        "layer (torch.nn.modules.module.Module)",
    ),
    **{
        f"{name} unsupported": (
            f"with unittest.mock.patch.dict(versions.SUPPORTED, {{{name!r}: SpecifierSet('<0.1')}}):\n"
            "    bridge.safe_layers(model_type, ours)",
            "UnsupportedVersionError",
            f"pip install '{name}<0.1'",
        )
        for name in ("mcore-bridge", "megatron-core", "fla-core")
    },
}


@pytest.fixture(scope="module")
def raised() -> dict[str, list[str]]:
    """Each failure's error name and message; all in one process, because importing ms-swift's stack takes long."""
    code = SETUP + "import unittest.mock\nresult = {}\n"
    for name, (body, _, _) in FAILURES.items():
        code += "try:\n" + textwrap.indent(body, "    ")
        code += f"\nexcept Exception as error:\n    result[{name!r}] = [type(error).__name__, str(error)]\n"
    return json.loads(run(code + "print(json.dumps(result))").splitlines()[-1])


@pytest.mark.parametrize("failure", FAILURES)
def test_fails_closed(raised: dict[str, list[str]], failure: str) -> None:
    _, error, message = FAILURES[failure]
    assert raised[failure][0] == error
    assert message in raised[failure][1]


def test_the_registry_is_swapped_while_the_model_is_built_and_restored_after() -> None:
    out = run(
        SETUP
        + """
before = get_model_meta(model_type)
with bridge.safe_layers(model_type, ours) as meta:
    assert get_model_meta(model_type) is meta
    assert meta.loader.gated_delta_net is bridge.SafeGatedDeltaNet and issubclass(meta.loader, before.loader)
    with contextlib.suppress(RuntimeError), bridge.safe_layers(model_type, Settings("torch")) as inner:
        assert inner.loader.gated_delta_net is bridge.TorchGatedDeltaNet
        raise RuntimeError
    assert get_model_meta(model_type) is meta
assert get_model_meta(model_type) is before
print("restored")
"""
    )
    assert out.splitlines()[-1] == "restored"
