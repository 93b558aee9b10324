"""The dicts of logprobs."""

from __future__ import annotations

import numpy as np
from sampling_helpers import WordTokenizer

from cotrt.sampling.logprobs import Logprob, TopLogprobs, logprob_dict, logprob_dicts

TOP = TopLogprobs(np.array([3, 1]), np.array([-0.5, -1.5], np.float32), 3)
TOKENIZER = WordTokenizer(["a", "b", "c", "d"])


def test_sampled_token_is_always_there_and_first() -> None:
    entries = logprob_dict(0, -2.0, TOP, TOKENIZER)
    assert list(entries) == [0, 3, 1]
    assert entries == {
        0: Logprob(-2.0, 3, "a"),
        3: Logprob(-0.5, 1, "d"),
        1: Logprob(-1.5, 2, "b"),
    }


def test_sampled_token_of_the_top_list_is_not_there_twice() -> None:
    top = TopLogprobs(TOP.ids, TOP.logprobs, 1)
    assert list(logprob_dict(3, -0.5, top, None)) == [3, 1]


def test_zero_logprobs_are_the_sampled_one_alone_with_its_rank() -> None:
    top = TopLogprobs(np.empty(0, np.int64), np.empty(0, np.float32), 7)
    assert logprob_dict(2, -3.0, top, None) == {2: Logprob(-3.0, 7, None)}


def test_ids_beyond_the_tokenizer_have_empty_text() -> None:
    assert logprob_dict(99, -3.0, None, TOKENIZER) == {99: Logprob(-3.0, None, "")}


def test_first_token_of_a_prompt_has_none() -> None:
    assert logprob_dicts([(0, None, None), (1, -1.0, None)], None) == [None, {1: Logprob(-1.0)}]
