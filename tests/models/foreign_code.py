"""Code that comes with a model, named wherever it can be; it leaves a mark when it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

KNOWN = {"model_type": "llama", "tokenizer_class": "GPT2Tokenizer"}
UNKNOWN = {"model_type": "not_known", "tokenizer_class": "EvilTokenizer"}


def add_code(folder: Path, **entries: str) -> Path:
    """A module in the folder that leaves a mark when it runs, named wherever one can be named.

    Args:
        entries: of both configs, besides those that name the module.

    Returns:
        The mark's path.
    """
    mark = folder / "it-ran"
    classes = ("EvilTokenizer", "EvilTokenizerFast", "EvilConfig", "EvilModel")
    lines = [f"open({str(mark)!r}, 'w').close()", *(f"class {name}: pass" for name in classes)]
    (folder / "evil.py").write_text("\n".join(lines) + "\n")
    named = {
        "AutoConfig": "evil.EvilConfig",
        "AutoModelForCausalLM": "evil.EvilModel",
        "AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizerFast"],
    }
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        path = folder / name
        found = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(found | entries | {"auto_map": named}))
    return mark


def never_ran(mark: Path) -> bool:
    """Nor was it imported, from here or from a copy."""
    return not mark.exists() and not any(name.split(".")[-1] == "evil" for name in sys.modules)
