"""What random programs make fail: the model's weights, a user's function, the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from logged_model import probs

from cotrt.testing import CharTokenizer


class FlakyTokenizer(CharTokenizer):
    """Raises where it is to decode, while `is_broken`; `num_raised` is how often it did."""

    is_broken = False
    num_raised = 0

    def decode(self, ids: Sequence[int]) -> str:
        if self.is_broken:
            self.num_raised += 1
            raise LookupError("made to fail: the tokenizer")
        return super().decode(ids)


class Nan(float):
    """A weight above 0 whose logarithm is NaN."""

    def __new__(cls) -> Nan:
        return float.__new__(cls, "nan")

    def __gt__(self, other: object) -> bool:
        return True


class FlakyWeights:
    """Next-token weights that are wrong for some paths.

    Attributes:
        one_in: of so many paths one is wrong; 0: none is.
        raises: they raise, in place of being NaN.
        num_wrong: how often they were.
    """

    def __init__(self) -> None:
        self.one_in = 0
        self.raises = False
        self.num_wrong = 0

    def probs(self, path: list[int]) -> Mapping[int, float]:
        if self.one_in and hash(tuple(path)) % self.one_in == 0:
            self.num_wrong += 1
            if self.raises:
                raise ZeroDivisionError("made to fail: the weights")
            return {1: Nan()}
        return probs(path)
