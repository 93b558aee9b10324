"""What the Triton backend says where it cannot serve."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from cotrt.kernels.triton import support


@pytest.fixture
def outside_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace(origin=f"{name}/__init__.py")
    )


@pytest.mark.usefixtures("outside_the_interpreter")
def test_refusals_are_sentences(monkeypatch: pytest.MonkeyPatch):
    assert "CUDA device" in (support.refusal("cpu", torch.float16, 64, 16) or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "7.5" in (support.refusal("cuda", torch.float16, 64, 16) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert support.refusal("cuda", torch.float16, 64, 16) is None
    assert "head_dim 32" in (support.refusal("cuda", torch.float16, 32, 16) or "")


def test_a_folder_named_triton_is_not_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=None))
    assert "not installed" in (support.refusal("cuda", torch.float16, 64, 16) or "")
