"""`cotrt model`: a converted folder computes what its .gguf file computes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cotrt import LLM, SamplingParams
from cotrt.cli import main


@pytest.mark.parametrize(("family", "settings"), [("llama", {}), ("qwen3", {"head_dim": 32})])
def test_a_converted_folder_computes_what_the_file_does(
    family: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "models"))
    from checkpoints import make_model
    from test_gguf import write

    path = write(make_model(family, **settings), tmp_path / "model.gguf")
    folder = tmp_path / "folder"
    assert main(["model", "convert", str(path), str(folder)]) == 0
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = []
    for model in (path, folder):
        with LLM(model, dtype="bfloat16", kv_cache_memory_bytes=1 << 22) as llm:
            outputs.append(llm.generate([[3, 9, 50, 7]], params, use_tqdm=False)[0].outputs[0])
            assert llm.tokenizer.has_chat_template
    assert outputs[0].token_ids == outputs[1].token_ids
    with pytest.raises(SystemExit) as caught:
        main(["model", "convert", str(path), str(folder)])
    assert caught.value.code == 1
    sys.modules.pop("test_gguf", None)


def test_path_of_what_is_not_here_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["model", "path", "nobody/has-this-model"])
    assert caught.value.code == 1
    assert "nobody/has-this-model" in capsys.readouterr().err
