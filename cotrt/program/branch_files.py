"""`Branch.save` and `LLM.load_branch`."""

from __future__ import annotations

import logging
import os
import secrets
from typing import TYPE_CHECKING, Any

from cotrt.errors import InvalidRequestError, SavedBranchError
from cotrt.program.handle import warn_inside_loop

if TYPE_CHECKING:
    from cotrt.program.branch import Branch
    from cotrt.program.runtime import Runtime
    from cotrt.saved.reader import SavedFile

logger = logging.getLogger("cotrt")

KV_CHOICES = ("auto", "recompute")


def save(branch: Branch, path: Any, *, subtree: bool) -> None:
    """Save a branch, or one with everything grown from it; see `Branch.save`."""
    from cotrt.engine.model import computed_under
    from cotrt.engine.saving import Snapshot
    from cotrt.saved.writer import SavedWriter

    name = _checked_path(path, "save")
    if not isinstance(subtree, bool):
        raise InvalidRequestError(f"subtree={subtree!r}: must be True or False")
    runtime = branch._runtime
    runtime.check()
    warn_inside_loop()
    engine = runtime.engine
    with engine.lock:
        branch._check(idle=False)
        snapshot = Snapshot(engine, branch._seq, subtree=subtree)
    try:
        branches = snapshot.branches()
        key = runtime.saved_key() if snapshot.is_our_own else None
        with engine.lock:
            planned = snapshot.planned()
        with SavedWriter(
            name,
            branches,
            planned=planned,
            shape=engine.model.kv_shape,
            fingerprint=engine.model.fingerprint,
            computed_under=computed_under(engine.model),
            key=key,
        ) as writer:
            snapshot.write(writer, planned)
    finally:
        snapshot.release()


def load(runtime: Runtime, path: Any, kv: Any) -> Branch:
    """Make the branches of a file again; see `LLM.load_branch`."""
    from cotrt.engine.model import kv_name
    from cotrt.engine.records.saved_source import SavedSource
    from cotrt.engine.saving import restore
    from cotrt.program.branch import Branch
    from cotrt.saved.reader import SavedFile

    name = _checked_path(path, "load_branch")
    if not isinstance(kv, str) or kv not in KV_CHOICES:
        raise InvalidRequestError(
            f'kv={kv!r}: must be "auto" or "recompute" (tokens alone, which any model can load)'
        )
    runtime.check()
    warn_inside_loop()
    file, source, private = SavedFile(name), None, None
    try:
        if kv == "auto":
            _check_model(runtime, file)
        _check_tokens(runtime, file)
        engine = runtime.engine
        if kv == "auto" and file.chunks and _has_the_same_bits(runtime, file):
            key = runtime.saved_key()
            if key is None or not file.is_signed_by(key):
                # Anybody may have written it: its KV is for these branches and their forks alone.
                private = secrets.token_bytes(32)
            source = SavedSource(
                file,
                name=kv_name(engine.model),
                block_size=engine.tree.block_size,
                first=private,
            )
        with engine.lock:
            runtime.check()
            sequences = restore(engine, file.branches, source, private)
            made = [
                Branch(runtime, seq)
                for seq, saved in zip(sequences, file.branches)
                if not saved.closed
            ]
            made[0]._kept = made[1:]
    except BaseException:
        file.close()
        raise
    if source is None:
        file.close()
    return made[0]


def _checked_path(path: Any, verb: str) -> str:
    if isinstance(path, (str, os.PathLike)):
        name = os.fspath(path)
        if isinstance(name, str) and name and "\0" not in name:
            return name
    raise InvalidRequestError(
        f"{verb}({path!r:.80}): the path must be a str or PathLike that names a file"
    )


def _has_the_same_bits(runtime: Runtime, file: SavedFile) -> bool:
    """The KV in the file may be used; where bits are promised only that of equal conditions may."""
    from cotrt.engine.model import computed_under

    here = computed_under(runtime.engine.model)
    if not here or here == file.computed_under:
        return True
    there = (
        f"it is of: {file.computed_under}" if file.computed_under else "it does not say of which"
    )
    logger.warning(
        "%s: its KV is computed again, for deterministic=True promises the bits of this LLM's "
        "conditions (%s; %s)",
        file.path,
        here,
        there,
    )
    return False


def _check_model(runtime: Runtime, file: SavedFile) -> None:
    """The KV in the file is the model's own."""
    from cotrt.models.weights import covers_every_byte

    model = runtime.engine.model
    # Files were once made whose fingerprint went on with the kernels of a deterministic model.
    fingerprint = file.fingerprint.partition("-deterministic-")[0]
    if fingerprint == model.fingerprint and file.shape == model.kv_shape:
        return
    what = "weights, dtype or RoPE differ"
    if covers_every_byte(model.fingerprint) and not covers_every_byte(fingerprint):
        what = "an older version saved it, whose fingerprint did not cover every weight"
    if file.shape != model.kv_shape:
        what = f"its KV is {_shape(file.shape)}, this model's is {_shape(model.kv_shape)}"
    raise SavedBranchError(
        f"{file.path} was saved from another model ({what}): load it with the model that saved "
        'it, or as tokens alone with load_branch(path, kv="recompute")'
    )


def _shape(shape: Any) -> str:
    return (
        f"{shape.num_layers} layers of {shape.num_kinds} x {shape.num_heads} heads x "
        f"{shape.head_dim} in {shape.dtype}"
    )


def _check_tokens(runtime: Runtime, file: SavedFile) -> None:
    """Every token is in the vocabulary, and every branch fits."""
    for index, branch in enumerate(file.branches):
        if len(branch.tokens) and int(branch.tokens.max()) >= runtime.vocab_size:
            raise SavedBranchError(
                f"{file.path}: branch {index} holds token {int(branch.tokens.max())}, this model's "
                f"vocabulary ends at {runtime.vocab_size - 1}: load it with a model of the same "
                "tokenizer"
            )
        runtime.check_length(branch.length)
