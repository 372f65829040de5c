"""A U-Net that learns to transport a scalar field: advection and diffusion on a periodic square.

one process     python examples/06_unet_fields.py
two processes   torchrun --standalone --nproc-per-node 2 examples/06_unet_fields.py
any MPI         mpiexec -n 4 python examples/06_unet_fields.py
Slurm job       sbatch -A ACCOUNT -N 2 --gpus-per-node=4 jobs/slurm.sh examples/06_unet_fields.py
PBS job         ARGS=examples/06_unet_fields.py qsub -A ACCOUNT jobs/pbs.sh
weak scaling    ddpkit bench ddp -n 2 --full-only examples/06_unet_fields.py

The network receives a field and a steady flow, and predicts the field one time unit later. A
spectral solver computes the truth of each sample from the sample's seed: there is nothing to
download, and no sample is seen twice. The defaults suit two CPU cores: in 100 s the relative error
falls from 1.04 to 0.08, where the unchanged field has 0.84 and the mean has 1. For GPUs try
--width 64 --batch-size 64 --steps 5000 --workers 8. New against 01: images in the channels-last
format, automatic mixed precision on GPUs, samples that worker processes compute, and a picture.
"""

import argparse
import math
from pathlib import Path

import torch
from ddpkit import setup_distributed
from ddpkit.log import get_logger
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate, mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

log = get_logger(__name__)  # log.info prints on rank 0 alone

SIZE = 48  # points in each direction; a side is 2 pi long
DIFFUSIVITY = 0.01
SPEED = 0.5  # root mean square: the flow carries the field over about 4 points
SOLVER_STEPS = 10
HELD_OUT = 32  # samples of each rank on which the error is measured

# The data -----------------------------------------------------------------------------------------

rows, columns = torch.fft.fftfreq(SIZE, 1 / SIZE), torch.fft.rfftfreq(SIZE, 1 / SIZE)
WAVES = torch.stack(torch.meshgrid(rows, columns, indexing="ij"))
GRADIENT = 1j * WAVES  # times a spectrum: the spectra of d/dy and d/dx
LAPLACE = -WAVES.square().sum(0)
RESOLVED = WAVES.abs().amax(0) < SIZE / 3  # the product of two such waves is not aliased


def advance(field: Tensor, flow: Tensor) -> Tensor:
    """Return a field (y, x) after one time unit in a flow (2, y, x), by Runge-Kutta steps."""

    def change(spectrum: Tensor) -> Tensor:
        slopes = torch.fft.irfft2(GRADIENT * spectrum)
        advection = torch.fft.rfft2((flow * slopes).sum(0))
        return DIFFUSIVITY * LAPLACE * spectrum - RESOLVED * advection

    spectrum, step = torch.fft.rfft2(field), 1 / SOLVER_STEPS
    for _ in range(SOLVER_STEPS):
        k1 = change(spectrum)
        k2 = change(spectrum + step / 2 * k1)
        k3 = change(spectrum + step / 2 * k2)
        k4 = change(spectrum + step * k3)
        spectrum = spectrum + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return torch.fft.irfft2(spectrum)


def random_spectrum(largest: float, generator: torch.Generator) -> Tensor:
    """Return the spectrum of a smooth field with mean 0, whose waves reach about `largest`."""
    noise = torch.fft.rfft2(torch.randn(SIZE, SIZE, generator=generator))
    noise[0, 0] = 0
    return noise * torch.exp(LAPLACE / largest**2)


class Transport(Dataset[tuple[Tensor, Tensor]]):
    """A field and a flow (3, y, x), and the field one time unit later (1, y, x), for each seed."""

    def __init__(self, seeds: range) -> None:
        self.seeds = seeds

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seeds[index])
        field = torch.fft.irfft2(random_spectrum(4, generator))
        field /= field.std()
        dy, dx = torch.fft.irfft2(GRADIENT * random_spectrum(3, generator))
        flow = torch.stack([dx, -dy])  # of a stream function: without divergence
        flow *= SPEED / flow.square().sum(0).mean().sqrt()
        return torch.cat([field[None], flow]), advance(field, flow)[None]


# The model ----------------------------------------------------------------------------------------


def convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, padding=1, padding_mode="circular")


def two_convolutions(inputs: int, outputs: int) -> nn.Module:
    first, second = convolution(inputs, outputs), convolution(outputs, outputs)
    return nn.Sequential(first, nn.GELU(), second, nn.GELU())


class UNet(nn.Module):
    """Map (batch, 3, y, x) to (batch, 1, y, x): down to coarser grids, and up again."""

    def __init__(self, width: int, levels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        pairs = list(zip(widths, widths[1:], strict=False))
        self.down = nn.ModuleList(two_convolutions(a, b) for a, b in [(3, width), *pairs])
        self.up = nn.ModuleList(two_convolutions(a + b, a) for a, b in reversed(pairs))
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down[0](x)
        finer = []
        for layers in self.down[1:]:
            finer.append(x)
            x = layers(avg_pool2d(x, 2))
        for layers in self.up:
            x = layers(torch.cat([finer.pop(), interpolate(x, scale_factor=2.0)], dim=1))
        return self.last(x)


# The training -------------------------------------------------------------------------------------


def draw(path: Path, inputs: Tensor, truth: Tensor, guess: Tensor) -> None:
    """Draw fields, truth, predictions and errors, if matplotlib is installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        log.info(f"{path} was not drawn: matplotlib is missing. Install it: pip install matplotlib")
        return
    figure = Figure(figsize=(12, 3 * len(truth)), layout="constrained")
    FigureCanvasAgg(figure)
    titles = ["field and flow", "truth, one time unit later", "prediction", "error"]
    images = torch.cat([inputs[:, :1], truth, guess, guess - truth], dim=1)
    grid = figure.subplots(len(truth), 4, squeeze=False)
    for axes, values, flow in zip(grid, images, inputs[:, 1:], strict=True):
        for axis, image, title in zip(axes, values, titles, strict=True):
            limit = (values[1] if title == "prediction" else image).abs().max()
            colours = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
            shown = axis.imshow(image.numpy(), origin="lower", **colours)
            axis.set(title=title, xticks=[], yticks=[])
            figure.colorbar(shown, ax=axis, shrink=0.8)
        points = torch.arange(2, SIZE, 4)
        v, u = flow[:, points][:, :, points]
        axes[0].quiver(points, points, u, v)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    log.info(f"{path} written")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a U-Net on advection and diffusion.")
    add = parser.add_argument
    add("--steps", type=int, default=1000)
    add("--batch-size", type=int, default=8, help="samples per rank and step")
    add("--width", type=int, default=16, help="channels on the finest grid")
    add("--lr", type=float, default=2e-3, help="highest learning rate")
    add("--workers", type=int, default=0, help="processes of each rank that compute samples")
    add("--picture", type=Path, default=Path("runs/unet_fields.png"), metavar="FILE")
    add("--backend", help="gloo, nccl or xccl (default: the device's)")
    args = parser.parse_args()

    with setup_distributed(args.backend) as job:
        on_gpu = job.device.type != "cpu"
        # Seeds from 0 on are for training, and each is used once: there are no epochs.
        data = Transport(range(args.steps * args.batch_size * job.world_size))
        sampler = DistributedSampler(data, job.world_size, job.rank, shuffle=False)
        loader = DataLoader(
            data, args.batch_size, sampler=sampler, num_workers=args.workers, pin_memory=on_gpu
        )
        held_out = Transport(range(-HELD_OUT * (job.rank + 1), -HELD_OUT * job.rank))
        samples = next(iter(DataLoader(held_out, HELD_OUT)))
        fields, later = (tensor.to(job.device) for tensor in samples)

        torch.manual_seed(0)
        # Channels last: the channels of a point are neighbours in memory. Tensor cores and oneDNN
        # compute convolutions in this format. It is set before DDP, whose buckets keep it.
        model = UNet(args.width).to(job.device, memory_format=torch.channels_last)
        ddp = DDP(model, device_ids=job.device_ids)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps)
        # float16 has 11 significant bits, bfloat16 has 8: too few for a smooth field. The scaler
        # multiplies the loss, so that small gradients do not become 0 in float16.
        autocast = torch.autocast(job.device.type, torch.float16, enabled=on_gpu)
        scaler = torch.amp.GradScaler(job.device.type, enabled=on_gpu)

        def relative_error(guess: Tensor) -> float:
            """Return the root mean square error on all ranks, relative to that of guessing 0."""
            squares = torch.stack([mse_loss(guess, later), later.square().mean()])
            error, size = job.all_reduce_mean(squares).tolist()
            return math.sqrt(error / size)

        with torch.no_grad():
            first = relative_error(model(fields))
        unchanged = relative_error(fields[:, :1])
        log.info(f"error of guessing the mean 1, the unchanged field {unchanged:.3f}")
        log.info(f"step     0/{args.steps}: error {first:.4f}")

        for step, (inputs, truth) in enumerate(loader, 1):
            inputs = inputs.to(job.device, memory_format=torch.channels_last, non_blocking=True)
            truth = truth.to(job.device, non_blocking=True)
            with autocast:
                loss = mse_loss(ddp(inputs), truth)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
            if step % 100 == 0 or step == args.steps:
                with torch.no_grad():
                    guess = model(fields)
                error = relative_error(guess)
                log.info(f"step {step:5d}/{args.steps}: error {error:.4f}")

        log.info(f"the error has become {first / error:.1f} times smaller")
        if job.is_main:
            draw(args.picture, *(tensor[:3].cpu() for tensor in (fields, later, guess)))


if __name__ == "__main__":
    main()
