"""A model's records: what they are called, and that another backend goes on from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_model, save

from cotrt.kernels.cpu.native import missing_reason
from cotrt.models.conditions import conditions
from cotrt.models.loading import load

needs_native = pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    return save(model, tmp_path_factory.mktemp("tiny"))


def test_the_fingerprint_of_kv_tells_dtypes_apart(folder: Path) -> None:
    marks = {load(folder, dtype=dtype).model.fingerprint for dtype in ("float32", "bfloat16")}
    assert len(marks) == 2 and "" not in marks


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_native)])
def test_conditions_are_of_deterministic_models_alone(folder: Path, backend: str) -> None:
    options = {"dtype": "float32", "attention_backend": backend}
    plain, exact = load(folder, **options).model, load(folder, **options, deterministic=True).model
    assert plain.computed_under == "" and plain.fingerprint == exact.fingerprint
    assert exact.computed_under == conditions(backend, "cpu", 16)


@pytest.mark.parametrize(
    "backend", ["reference", "triton", pytest.param("cpu", marks=needs_native)]
)
def test_conditions_name_what_bits_hang_on(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    before = conditions(backend, "cpu", 16)
    assert before == conditions(backend, "cpu", 16)
    changes = {
        "cotrt.__version__": ("9", True),
        "torch.__version__": ("9", True),
        "cotrt.models.conditions.cpu_name": (lambda: "another", True),
        "torch.get_num_threads": (lambda: 77, backend == "reference"),
        "torch.backends.cpu.get_cpu_capability": (lambda: "another", backend != "triton"),
        "cotrt.kernels.cpu.native.isa": (lambda: "another", backend == "cpu"),
        "cotrt.kernels.cpu.native.build_mark": (lambda: "another", backend == "cpu"),
    }
    if backend == "triton":
        changes["triton.__version__"] = ("9", True)
    for name, (value, matters) in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            assert (conditions(backend, "cpu", 16) != before) == matters, name
    assert (conditions(backend, "cpu", 32) != before) == (backend == "triton")


@needs_native
def test_every_backend_has_the_same_records(folder: Path) -> None:
    models = [
        load(folder, dtype="bfloat16", attention_backend=backend, block_size=16).model
        for backend in ("reference", "cpu")
    ]
    assert models[0].kv_shape == models[1].kv_shape
    assert models[0].fingerprint == models[1].fingerprint
    shape = models[0].kv_shape
    assert shape.token_bytes == models[0].kv_bytes_per_token
    for model in models:
        model.allocate_kv(4, 16)
    bits = np.random.default_rng(0).integers(0, 1 << 14, (2, 16 * shape.token_bytes // 2))
    records = bits.astype(np.uint16).view(np.uint8)
    models[0].write_blocks([2, 0], records)
    models[1].write_blocks([1, 3], models[0].read_blocks([2, 0]))
    assert np.array_equal(models[1].read_blocks([1, 3]), records)
