"""Communication hooks on gloo: the gradients of the mean, the same on every rank; the code that bench.py prints."""
from __future__ import annotations

from tests.unit.programs import python

HOOKS = """
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
import utils
from utils import setup_distributed
from utils.tools.bench import try_settings, worker
from utils.tools.bench.hooks import bf16_hook, fp16_hook, in_order
with setup_distributed("gloo") as dist:
    def train(hook, state=None, steps=1):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
        ddp = DDP(model, bucket_cap_mb=0.02)
        if hook:
            ddp.register_comm_hook(state, hook)
        for step in range(steps):
            torch.manual_seed(10 * step + dist.rank)
            ddp.zero_grad()
            ddp(torch.randn(8, 64)).square().mean().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    exact = train(None)
    for hook, bits in ((bf16_hook, 8), (fp16_hook, 11)):
        gradients = train(hook)
        assert (gradients - exact).abs().max() <= 2 ** -bits * 4 * exact.abs().max(), hook
        assert not torch.equal(gradients, exact)
    power = train(in_order(powerSGD_hook), PowerSGDState(None, 1, start_powerSGD_iter=2), steps=12)
    of_rank_0 = power.clone()
    torch.distributed.broadcast(of_rank_0, 0)
    assert torch.equal(power, of_rank_0) and power.isfinite().all()
    for hook in ("bf16", "powersgd-4"):
        names = {"DistributedDataParallel": DDP, "ddp": DDP(torch.nn.Linear(64, 64))}
        exec("\\n".join(try_settings.code(worker.Settings(hook=hook))), names)
        names["ddp"](torch.ones(2, 64)).sum().backward()
    print("checked", flush=True)
"""


def test_hooks_on_gloo() -> None:
    done = python("-c", HOOKS, ranks=2)
    assert done.returncode == 0 and done.stdout.count("checked") == 2, done.stderr
