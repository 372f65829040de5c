"""Small trainings in the style of public ones, none of which knows the kit: watched.py runs them.

Each is one file. A comment "# FAULT" is where watched.py lets rank 1 go wrong in step 3: there, `rank` and `step` are
known. The last line of each rank is "loss", its rank and the bits of its last loss.
"""
from __future__ import annotations

_IMPORTS = """\
import os, signal, sys, time
import torch
import torch.distributed as dist
"""

PLAIN = _IMPORTS + """\
from torch.nn.parallel import DistributedDataParallel as DDP

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(6):
        # FAULT
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {rank} {loss.item().hex()}\\n", end="", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""

FSDP2 = _IMPORTS + """\
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
rank = mesh.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
for step in range(6):
    # FAULT
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {rank} {loss.item().hex()}\\n", end="", flush=True)
dist.destroy_process_group()
"""

TRAINER = """\
import os, signal, sys, time
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        words = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}

class Callback(TrainerCallback):
    def on_step_begin(self, args, state, control, **more):
        rank, step = args.process_index, state.global_step
        # FAULT

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=16, n_embd=32, n_layer=1, n_head=2))
args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=6, report_to=[], use_cpu=True,
                         save_strategy="no", logging_strategy="no", disable_tqdm=True)
done = Trainer(model, args, train_dataset=Words(), callbacks=[Callback()]).train()
print(f"loss {args.process_index} {done.training_loss.hex()}\\n", end="", flush=True)
"""

LIGHTNING = """\
import os, signal, sys, time
import lightning
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, step):
        rank = self.global_rank
        # FAULT
        self.loss = self.layer(batch[0]).square().mean()
        return self.loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

lightning.seed_everything(0)
data = DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=4)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
                            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
model = Model()
trainer.fit(model, data)
print(f"loss {trainer.global_rank} {model.loss.item().hex()}\\n", end="", flush=True)
"""

FABRIC = """\
import os, signal, sys, time
import lightning
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

def main():
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    rank = fabric.global_rank
    fabric.seed_everything(0)
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    data = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=4))
    for step, (inputs,) in enumerate(data):
        # FAULT
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        fabric.backward(loss)
        optimizer.step()
    print(f"loss {rank} {fabric.all_reduce(loss).item().hex()}\\n", end="", flush=True)

if __name__ == "__main__":
    main()
"""

ACCELERATE = """\
import os, signal, sys, time
import torch
import torch.distributed as dist
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(48, 4)), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for step, (inputs,) in enumerate(data):
    # FAULT
    loss = model(inputs).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {rank} {accelerator.gather(loss).mean().item().hex()}\\n", end="", flush=True)
accelerator.end_training()
"""

NANOGPT = """\
import contextlib, os, signal, sys, time
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

batch_size, block_size, vocab_size, gradient_accumulation_steps, eval_interval = 4, 16, 65, 2, 4
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group(backend="gloo")
    rank = int(os.environ["RANK"])
    master_process, seed_offset = rank == 0, rank
else:
    rank, master_process, seed_offset = 0, True, 0
if master_process:
    os.makedirs("out", exist_ok=True)
torch.manual_seed(1337)

class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(vocab_size, 32), torch.nn.Embedding(block_size, 32)
        self.block = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(32, vocab_size)

    def forward(self, x, y):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(x.size(1))
        h = self.block(self.wte(x) + self.wpe(torch.arange(x.size(1))), src_mask=mask)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())

model = GPT()
torch.manual_seed(1337 + seed_offset)
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def get_batch():
    data = torch.randint(vocab_size, (batch_size, block_size + 1))
    return data[:, :-1], data[:, 1:]

@torch.no_grad()
def estimate_loss():
    raw_model.eval()
    out = torch.stack([raw_model(*get_batch()) for _ in range(2)]).mean()
    raw_model.train()
    return out

step = 0
while True:
    if step % eval_interval == 0 and master_process:
        torch.save({"model": raw_model.state_dict(), "loss": estimate_loss()}, "out/ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = model(*get_batch()) / gradient_accumulation_steps
        loss.backward()
    # FAULT
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    step += 1
    if step > 6:
        break
print(f"loss {rank} {loss.item().hex()}\\n", end="", flush=True)
if ddp:
    dist.destroy_process_group()
"""

MESHES = """\
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

class Recipe:
    @record
    def __init__(self):
        dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=300))
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp_shard", "tp"))
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(Block(), Block())
        for block in self.model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["dp_shard"])
        fully_shard(self.model, mesh=mesh["dp_shard"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.step = 0

    def train_step(self):
        rank, step = dist.get_rank(), self.step
        # FAULT
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 8)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    @record
    def train(self):
        while self.step < 6:
            loss = self.train_step()
            self.step += 1
        print(f"loss {dist.get_rank()} {loss.item().hex()}\\n", end="", flush=True)

    def close(self):
        dist.destroy_process_group()

if __name__ == "__main__":
    recipe = None
    try:
        recipe = Recipe()
        recipe.train()
    finally:
        if recipe and sys.exc_info()[0] is None:
            recipe.close()
"""

VISION = """\
import datetime, os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

def init_distributed_mode():
    rank = int(os.environ["RANK"])
    print(f"| distributed init (rank {rank}): env://", flush=True)
    dist.init_process_group("gloo", init_method="env://", world_size=int(os.environ["WORLD_SIZE"]), rank=rank)
    dist.barrier()
    return rank

class FakeData(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 32, 32, generator=generator), index % 10

def conv_bn(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True))

class SmoothedValue:
    def __init__(self):
        self.count, self.total = 0, 0.0

    def update(self, value):
        self.count, self.total = self.count + 1, self.total + value

    def synchronize_between_processes(self):
        t = torch.tensor([self.count, self.total], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(t)
        return (t[1] / t[0]).item()

def train_one_epoch(model, criterion, optimizer, data_loader, rank):
    model.train()
    meter, start_time = SmoothedValue(), time.time()
    for step, (image, target) in enumerate(data_loader):
        # FAULT
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.update(loss.item())
    return meter.synchronize_between_processes()

def evaluate(model, criterion, data_loader):
    model.eval()
    meter = SmoothedValue()
    with torch.inference_mode():
        for image, target in data_loader:
            meter.update(criterion(model(image), target).item())
    return meter.synchronize_between_processes()

def main():
    rank = init_distributed_mode()
    torch.manual_seed(0)
    dataset = FakeData()
    sampler = DistributedSampler(dataset)
    data_loader = DataLoader(dataset, batch_size=2, sampler=sampler, num_workers=1)
    features = nn.Sequential(conv_bn(3, 8), conv_bn(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(features, nn.Linear(16, 10))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(1):
        sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, data_loader, rank)
        loss = evaluate(model, criterion, data_loader)
    print(f"loss {rank} {loss.hex()}\\n", end="", flush=True)

if __name__ == "__main__":
    main()
"""

SPAWN = """\
import datetime, os, signal, sys, time
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

def worker(local, node, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    limit = datetime.timedelta(seconds=15)
    dist.init_process_group("gloo", rank=local, world_size=2, timeout=limit)
    rank = 2 * node + local - 2  # the last of four is 1
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(6):
        # FAULT
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {rank} {loss.item().hex()}\\n", end="", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    node = int(os.environ["RANK"])
    mp.spawn(worker, (node, 20000 + (os.getppid() * 2 + node) % 9000), nprocs=2)
"""

HYDRA = _IMPORTS + """\
import hydra
from omegaconf import OmegaConf
from hydra.core.config_store import ConfigStore
from torch.nn.parallel import DistributedDataParallel as DDP

ConfigStore.instance().store("config", OmegaConf.create({"steps": 6, "optimizer": {"lr": 0.1}}))

@hydra.main(version_base=None, config_name="config")
def main(config):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), config.optimizer.lr)
    for step in range(config.steps):
        # FAULT
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {rank} {loss.item().hex()}\\n", end="", flush=True)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""

COMPILED = PLAIN.replace("DDP(torch.nn.Linear(8, 1))", "torch.compile(DDP(torch.nn.Linear(8, 1)))")

PROGRAMS = {
    "plain": PLAIN,
    "fsdp2": FSDP2,
    "nanogpt": NANOGPT,
    "meshes": MESHES,
    "spawn": SPAWN,
    "compile": COMPILED,
    "hydra": HYDRA,
    "accelerate": ACCELERATE,
    "trainer": TRAINER,
    "lightning": LIGHTNING,
    "fabric": FABRIC,
    "vision": VISION,
}
