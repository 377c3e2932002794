"""ms-swift plugin of the gradient tests: writes the first step's gradients in Hugging Face's layout.

Used with `--external_plugins <this file> --callbacks gradient_probe`. mcore-bridge gathers a parameter over tensor,
pipeline and expert ranks when it exports; handing it gradients in place of weights gives the whole model's gradient on
any parallel layout, in one naming. `--clip_grad 0` keeps the gradient as it was; PROBE_OUT names the file.
"""

import os

import torch
import torch.distributed as dist
from swift.megatron.callbacks import MegatronCallback, megatron_callbacks_map


class GradientProbe(MegatronCallback):
    def on_step_end(self) -> None:
        if self.state.iteration != 1:
            return
        trainer = self.trainer
        adapters = self.args.tuner_type == "lora"
        parameters = [p for model in trainer.wrapped_models for p in model.parameters()]
        weights = [p.data for p in parameters]
        # Contents are swapped in place: export reads tensors it may have cached by identity.
        saved = [w.clone() for w in weights]
        for parameter, weight in zip(parameters, weights, strict=True):
            gradient = getattr(parameter, "main_grad", None)
            weight.copy_(gradient) if gradient is not None and parameter.requires_grad else weight.zero_()
        exported = trainer.bridge.export_weights(trainer.unwrapped_models, target_device="cpu", peft_format=adapters)
        gradients = {name: tensor.float().clone() for name, tensor in exported if tensor is not None}
        for weight, copy in zip(weights, saved, strict=True):
            weight.copy_(copy)
        if dist.get_rank() == 0:
            torch.save(gradients, os.environ["PROBE_OUT"])


megatron_callbacks_map["gradient_probe"] = GradientProbe
