"""Step 1: every process learns which rank it is, and uses its own GPU."""

import torch
from ddpkit import Distributed, setup_distributed
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset


def train(job: Distributed) -> None:
    device = job.device

    torch.manual_seed(0)
    inputs = torch.randn(4096, 32)
    data = TensorDataset(inputs, inputs[:, :4].sin().sum(dim=1, keepdim=True))
    loader = DataLoader(data, batch_size=64, shuffle=True)

    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for epoch in range(2):
        total = 0.0
        for x, y in loader:
            loss = mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: {len(loader)} steps, loss {total / len(loader):.4f}", flush=True)

    torch.save(model.state_dict(), "model.pt")
    print("model.pt written", flush=True)


if __name__ == "__main__":
    train(setup_distributed())
