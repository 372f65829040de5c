"""Example 06: its solver is exact where a solution is known, and its training learns."""
from __future__ import annotations

import math
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.unit.programs import load_example, python


@pytest.fixture(scope="module")
def unet() -> ModuleType:
    return load_example("06_unet_fields")


def test_uniform_flow_moves_a_wave_and_diffusion_damps_it(unet: ModuleType) -> None:
    y, x = torch.meshgrid(*[torch.arange(unet.SIZE) * 2 * math.pi / unet.SIZE] * 2, indexing="ij")
    flow = torch.stack([torch.full_like(y, 0.4), torch.full_like(x, -0.7)])
    later = unet.advance(torch.cos(3 * x + 4 * y), flow)
    exact = math.exp(-unet.DIFFUSIVITY * 25) * torch.cos(3 * (x + 0.7) + 4 * (y - 0.4))
    assert (later - exact).abs().max() < 1e-4


def test_sample_depends_on_its_seed_alone_and_loses_no_mass(unet: ModuleType) -> None:
    inputs, truth = unet.Transport(range(5, 9))[2]
    assert torch.equal(inputs, unet.Transport(range(7, 8))[0][0])
    assert not torch.equal(inputs, unet.Transport(range(8, 9))[0][0])
    assert truth.mean().abs() < 1e-5 and 0.1 < truth.std() < inputs[0].std()
    dv_dy, du_dx = (torch.fft.irfft2(unet.GRADIENT[i] * torch.fft.rfft2(inputs[1 + i])) for i in (0, 1))
    assert (dv_dy + du_dx).abs().max() < 1e-4


def test_network_is_translation_equivariant_on_the_periodic_square(unet: ModuleType) -> None:
    model = unet.UNet(4).to(memory_format=torch.channels_last)
    fields = torch.randn(1, 3, unet.SIZE, unet.SIZE)
    with torch.no_grad():
        moved = model(fields.roll((8, 16), dims=(2, 3)))
        assert torch.allclose(moved, model(fields).roll((8, 16), dims=(2, 3)), atol=1e-5)


WITH_WARNINGS = """
import runpy, sys, warnings
warnings.simplefilter("default", DeprecationWarning)
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_training_learns_and_draws_or_says_why_not(tmp_path: Path) -> None:
    picture = tmp_path / "new folder" / "fields.png"
    done = python("-c", WITH_WARNINGS, "examples/06_unet_fields.py", "--steps", "12", "--width", "4",
                  "--batch-size", "4", "--picture", str(picture), ranks=2, warm=True)
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.findall(r"step +\d+/12: error ([0-9.]+)", done.stdout))
    assert last < first and re.search(r"the unchanged field \d\.\d+$", done.stdout, re.MULTILINE)
    assert picture.is_file() != ("was not drawn: matplotlib is missing" in done.stdout)
    assert "__array__" not in done.stderr  # numpy's warning of a tensor that is given to matplotlib
    assert "Grad strides" not in done.stderr  # a warning of DDP that buckets have another format
