"""Step 4: rank 0 alone prints and saves; the loss is the mean over the ranks."""

import torch
from ddpkit import Distributed, setup_distributed
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(job: Distributed) -> None:
    device = job.device

    torch.manual_seed(0)
    inputs = torch.randn(4096, 32)
    data = TensorDataset(inputs, inputs[:, :4].sin().sum(dim=1, keepdim=True))
    sampler = DistributedSampler(data, job.world_size, job.rank)  # it shuffles, too
    loader = DataLoader(data, batch_size=64, sampler=sampler)

    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    ddp = DDP(model, device_ids=job.device_ids)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)

    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for x, y in loader:
            loss = mse_loss(ddp(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()  # no .item(): it would wait for the GPU
        mean = job.all_reduce_mean(total / len(loader)).item()  # called by every rank
        if job.is_main:
            print(f"epoch {epoch}: {len(loader)} steps, loss {mean:.4f}", flush=True)

    if job.is_main:
        torch.save(model.state_dict(), "model.pt")  # not ddp.state_dict()
        print("model.pt written", flush=True)


if __name__ == "__main__":
    train(setup_distributed())
