"""The flag in ms-swift's real argument classes, and every way in which it fails closed; in one process with the stand-in."""

import os
import subprocess
import sys
import textwrap

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


def test_every_megatron_command_knows_the_flag() -> None:
    out = run("""
        import dataclasses
        import swift.megatron.arguments as arguments
        from transformers import HfArgumentParser
        from swift.utils.utils import _patch_get_type_hints
        for name in ("MegatronSftArguments", "MegatronPretrainArguments", "MegatronRLHFArguments", "MegatronExportArguments"):
            cls = getattr(arguments, name)
            with _patch_get_type_hints():
                parser = HfArgumentParser([cls])
            action = next(a for a in parser._actions if a.dest == "gdn_impl")
            assert tuple(action.choices) == ("default", "fla_safe", "torch") and action.default == "default", action
            assert "--gdn_impl {default,fla_safe,torch}" in parser.format_help()
        print("known")
    """)
    assert out.splitlines()[-1] == "known"


FAILURES = """
import contextlib, dataclasses, types
import torch
from packaging.specifiers import SpecifierSet
from fla_safe.errors import FlaSafeError
from fla_safe.megatron import bridge, versions
from fla_safe.settings import Settings
from mcore_bridge.model.register import get_model_meta

ours = Settings("fla_safe")
model_type = "qwen3_5"
"""


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        pytest.param(
            "bridge.safe_layers(model_type, Settings('fla_safe', mcore_gdn=False))",
            "NoGdnLayersError",
            "USE_MCORE_GDN=0",
            id="USE_MCORE_GDN=0",
        ),
        pytest.param(
            "bridge.safe_layers('gpt', ours)", "NoGdnLayersError", "no GDN layers", id="model type without GDN"
        ),
        pytest.param(
            "config = types.SimpleNamespace(linear_attention_freq=None, experimental_attention_variant=None)\n"
            "model = torch.nn.Module(); model.config = config\n"
            "bridge.verify_model([model], ours)",
            "NoGdnLayersError",
            "without GDN layers",
            id="built model without GDN",
        ),
        pytest.param(
            "stranger = torch.nn.Module(); stranger.A_log = stranger.dt_bias = torch.zeros(1)\n"
            "model = torch.nn.Module(); model.layer = stranger\n"
            "bridge.verify_model([model], ours)",
            "NotReplacedError",
            "layer (torch.nn.modules.module.Module)",
            id="layer not replaced",
        ),
        *(
            pytest.param(
                f"versions.SUPPORTED[{name!r}] = SpecifierSet('<0.1')\nbridge.safe_layers(model_type, ours)",
                "UnsupportedVersionError",
                f"pip install '{name}<0.1'",
                id=f"{name} unsupported",
            )
            for name in ("mcore-bridge", "megatron-core", "fla-core")
        ),
    ],
)
def test_fails_closed(body: str, error: str, message: str) -> None:
    out = run(
        FAILURES
        + "try:\n"
        + textwrap.indent(body, "    ")
        + "\nexcept FlaSafeError as raised:\n    print(type(raised).__name__, raised)\nelse:\n    print('no error')"
    )
    assert out.splitlines()[-1].startswith(error)
    assert message in out


def test_the_registry_is_swapped_while_the_model_is_built_and_restored_after() -> None:
    out = run(
        FAILURES
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
