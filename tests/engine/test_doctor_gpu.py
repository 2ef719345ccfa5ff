"""`kvloom doctor` on a machine with a GPU: the device, Triton and the attention libraries that prefill would use."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kvloom.doctor.command import report
from kvloom.kernels.attention.prefill_libraries import installed_libraries


def test_the_gpu_and_its_kernels_are_reported() -> None:
    found = report()
    assert len(found["gpus"]) == torch.cuda.device_count()
    gpu = found["gpus"][0]
    assert gpu["name"] == torch.cuda.get_device_name(0)
    assert 0 < gpu["free_memory"] <= gpu["memory"]
    kernels = {one["name"]: one["used"] for one in found["kernels"]}
    assert kernels["Triton"]
    assert kernels["cuDNN"] == torch.backends.cudnn.is_available()
    names = {library.name for library in installed_libraries()}
    assert {name for name in ("FlashAttention-3", "FlashInfer") if kernels[name]} == names
