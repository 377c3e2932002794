"""Triton 3.4 to 3.7.0 miscompile FLA's `chunk_bwd_dqkwg` on Hopper for tiles of 64 keys: wrong gradients of k and g.

Known as https://github.com/fla-org/flash-linear-attention/issues/640. FLA 0.5 and later refuse the kernel there unless
TileLang is installed; the refusal is lifted here, and the gradients for a key dimension of 64 are compared with those
of a step-by-step float64 recurrence. Needs a Hopper GPU.

    python fla_hopper_dqkwg.py      exit status 0: shown, 1: gone, 2: cannot tell
"""

import importlib
import os
import sys

os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"  # Triton's kernel, also where TileLang is installed

import torch
import torch.nn.functional as F
import triton


def recurrence(q, k, v, g, beta):
    """Gated delta rule, one token at a time: q, k [1, T, H, K]; v [1, T, H, V]; g, beta [1, T, H]."""
    state = q.new_zeros(q.shape[2], q.shape[3], v.shape[3])
    outs = []
    for t in range(q.shape[1]):
        state = state * g[0, t].exp()[:, None, None]
        step = beta[0, t, :, None] * (v[0, t] - torch.einsum("hk,hkv->hv", k[0, t], state))
        state = state + torch.einsum("hk,hv->hkv", k[0, t], step)
        outs.append(torch.einsum("hk,hkv->hv", q[0, t] * q.shape[3] ** -0.5, state))
    return torch.stack(outs)[None]


def gradients(rule, tensors, weight, dtype):
    leaves = [x.to(dtype if x.dim() == 4 else torch.promote_types(dtype, torch.float32)) for x in tensors]
    leaves = [x.detach().requires_grad_() for x in leaves]
    (rule(*leaves).double() * weight).sum().backward()
    return [x.grad.double() for x in leaves]


def main() -> int:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("=> cannot tell: needs a Hopper GPU")
        return 2
    import fla
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    print(f"fla {fla.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")
    importlib.import_module("fla.ops.common.chunk_o").IS_NVIDIA_HOPPER = False

    def fused(q, k, v, g, beta):
        return chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0]

    torch.manual_seed(0)
    shape = (1, 256, 4, 64)
    q, k, v, weight = (torch.randn(shape, device="cuda").double() for _ in range(4))
    q, k = (F.normalize(x, dim=-1).bfloat16().double() for x in (q, k))
    v, weight = v.bfloat16().double(), weight.bfloat16().double()
    g = F.logsigmoid(torch.randn(shape[:3], device="cuda")).double()
    beta = torch.rand(shape[:3], device="cuda").double()
    tensors = (q, k, v, g, beta)
    got = gradients(fused, tensors, weight, torch.bfloat16)
    right = gradients(recurrence, tensors, weight, torch.float64)
    errors = {n: ((a - b).norm() / b.norm()).item() for n, a, b in zip("qkvgb", got, right, strict=True)}
    print(", ".join(f"d{name}: {error:.1e}" for name, error in errors.items()) + " (relative errors)")
    wrong = max(errors.values()) > 0.05
    print("=> present" if wrong else "=> gone")
    return 0 if wrong else 1


if __name__ == "__main__":
    sys.exit(main())
