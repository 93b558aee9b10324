"""Every error that cotrt raises on purpose, in one tree.

    CotrtError
    ├── InvalidRequestError (ValueError)   an argument, option or combination that is not allowed
    │   ├── PromptTooLongError             more tokens than max_model_len
    │   └── KVCacheExhaustedError          more tokens than the whole KV pool can ever hold
    ├── BranchBusyError                    the branch is generating; wait for it or cancel it
    ├── BranchPrunedError                  the branch was pruned or closed; `.output` has its text
    ├── ModelLoadError                     a model that is missing, broken or not supported
    ├── SavedBranchError                   a saved branch that is damaged or of another model
    ├── NumericsError                      NaN or infinite logits; `.output` has what came before
    └── EngineDeadError                    the engine has stopped (closed, forked, or a broken law)

A message says what was wrong, the value, the limit, and what to change.
"""

from __future__ import annotations

from typing import Any


class CotrtError(Exception):
    """Root of the tree: catch it to catch everything that cotrt raises on purpose."""


class InvalidRequestError(CotrtError, ValueError):
    """An argument, option or combination that is not allowed, or is not in this version.

    Attributes:
        field: the field or argument that is to blame, where one is; else ``None``.
        outputs: for a call with several prompts, the finished results in the order of the
            prompts with ``None`` for those that failed; else ``None``.
    """

    field: str | None = None
    outputs: list[Any] | None = None

    def __init__(self, *args: object, field: str | None = None) -> None:
        super().__init__(*args)
        if field is not None:
            self.field = field


class PromptTooLongError(InvalidRequestError):
    """A sequence that leaves no room within ``max_model_len``."""


class KVCacheExhaustedError(InvalidRequestError):
    """A sequence within ``max_model_len`` that the whole KV pool could never hold."""


class BranchBusyError(CotrtError):
    """The branch is running: wait with ``g.result()`` or stop it with ``g.cancel()``."""


class BranchPrunedError(CotrtError):
    """The branch was pruned or closed.

    Attributes:
        output: the ``CompletionOutput`` made before the prune, or ``None``.
    """

    def __init__(self, message: str, output: Any = None) -> None:
        super().__init__(message)
        self.output = output


class ModelLoadError(CotrtError):
    """A model folder, file or hub id that is missing, broken, gated or not supported."""


class SavedBranchError(CotrtError):
    """A saved branch that cannot be written or read, is damaged, or belongs to another model."""


class NumericsError(CotrtError):
    """The model gave NaN or infinite logits for one sequence; others are not touched.

    Attributes:
        output: the ``CompletionOutput`` made before it, or ``None``.
    """

    def __init__(self, message: str, output: Any = None) -> None:
        super().__init__(message)
        self.output = output


class EngineDeadError(CotrtError):
    """The engine has stopped: it was closed, the process was forked, or a law was broken.

    Attributes:
        at_exit: it stopped because the program is ending.
    """

    at_exit = False
