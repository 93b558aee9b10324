"""Same tokens, same seed, same draws, and nothing else decides them."""

from __future__ import annotations

import subprocess

import pytest
from api_helpers import letters, run_program, scripted

from cotrt import Branches, SamplingParams
from cotrt.sampling.seeds import output_seed

RETRY = """
llm = scripted(letters)
branch = llm.branch('Retry:')
start = len(branch)
texts = []
for _ in range(50):
    texts.append(branch.generate(max_tokens=12).result().text)
    branch.truncate(start)
print(len(set(texts)), *texts)
"""


def test_truncate_and_generate_50_times_are_50_draws_and_the_same_50_in_another_process():
    first, second = run_program(RETRY), run_program(RETRY)
    assert isinstance(first, subprocess.CompletedProcess)
    assert first.stdout == second.stdout and first.stdout.startswith("50 "), first.stderr


def test_same_draws_keeps_the_epoch_and_an_explicit_seed_replaces_it():
    with scripted() as llm:
        branch = llm.branch("abc")
        first = branch.generate(max_tokens=20).result().text
        branch.truncate(3, same_draws=True)
        assert branch.generate(max_tokens=20).result().text == first
        branch.truncate(3)
        assert branch.generate(max_tokens=20).result().text != first
        texts = set()
        for _ in range(3):
            branch.truncate(3)
            texts.add(branch.generate(max_tokens=20, seed=7).result().text)
        assert len(texts) == 1
        branch.truncate(len(branch))  # removes nothing: no new epoch
        branch.truncate(3, same_draws=True)


def test_draws_do_not_depend_on_batch_mates_pruned_siblings_or_how_they_are_asked_for():
    with scripted() as llm, scripted() as other:
        root = llm.branch("abc")
        children = root.fork(4)
        children[0].prune()
        children[2].prune()
        texts = [g.text for g in children[1::2].generate(max_tokens=30).result()]

        twin = other.branch("abc")
        kept = [twin.fork()[0] for _ in range(4)][1::2]
        assert [b.generate(max_tokens=30).result().text for b in kept] == texts
        # A child forked after the prune is the fifth, not the third.
        fifth = twin.fork()[0]
        assert root.fork()[0].generate(max_tokens=9).result() == (
            fifth.generate(max_tokens=9).result()
        )


def test_n_draws_with_one_seed_are_different_and_the_first_has_the_seed_itself():
    with scripted() as llm:
        params = SamplingParams(seed=42, n=4, max_tokens=15)
        outputs = llm.generate("abc", params)[0].outputs
        assert [o.index for o in outputs] == [0, 1, 2, 3]
        assert len({o.text for o in outputs}) == 4
        assert [o.text for o in llm.generate("abc", params)[0].outputs] == [o.text for o in outputs]
        alone = llm.generate("abc", SamplingParams(seed=42, max_tokens=15))[0].outputs[0]
        assert alone.text == outputs[0].text
        third = llm.generate("abc", SamplingParams(seed=output_seed(42, 2), max_tokens=15))
        assert third[0].outputs[0].text == outputs[2].text

        # On branches, one params for all count likewise; one each are as they are given.
        root = llm.branch("abc")
        same = root.fork(4).generate(SamplingParams(seed=42, max_tokens=15)).result()
        assert [o.text for o in same] == [o.text for o in outputs]
        each = root.fork(2).generate([SamplingParams(seed=42, max_tokens=15)] * 2).result()
        assert [o.text for o in each] == [outputs[0].text] * 2
        # And for different prompts of one call the seed is used as it is.
        both = llm.generate(["abc", "abc"], SamplingParams(seed=42, max_tokens=15))
        assert [r.outputs[0].text for r in both] == [outputs[0].text] * 2


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63, 2**64 - 1])
def test_every_seed_of_the_range_draws_and_repeats(seed):
    with scripted() as llm:
        params = SamplingParams(seed=seed, max_tokens=8)
        first, second = llm.generate(["abc", "abc"], params)
        assert first.outputs[0].text == second.outputs[0].text


def test_the_seed_of_the_model_decides_what_unseeded_programs_draw():
    def program(seed):
        with scripted(seed=seed) as llm:
            texts = [llm.generate("abc", SamplingParams(max_tokens=9))[0].outputs[0].text]
            root = llm.branch("abc")
            texts += [o.text for o in root.fork(2).generate(max_tokens=9).result()]
            return texts

    assert program(1) == program(1) != program(2)
    assert len(set(program(1))) == 3


def test_priority_goes_first_and_changes_no_draw():
    order = []

    def probs(ids):
        if len(ids) > 3:
            order.append(chr(ids[0]))
        return letters(ids)

    with scripted(probs, max_num_seqs=1) as llm:
        prompts = ["xaa", "yaa", "zaa"]
        params = [SamplingParams(seed=1, max_tokens=4, priority=p) for p in (0, 5, -5)]
        first = llm.submit("www", SamplingParams(max_tokens=30))
        outputs = llm.submit(prompts, params).result()
        first.result()
        waited = [name for name in order if name != "w"]
        assert waited == ["z"] * 3 + ["x"] * 3 + ["y"] * 3
        alone = llm.generate("yaa", SamplingParams(seed=1, max_tokens=4))
        assert alone[0].outputs[0].text == outputs[1].outputs[0].text


def test_generations_of_branches_given_as_prompts_continue_in_place():
    with scripted() as llm:
        branches = Branches([llm.branch("abc"), llm.branch("xyz")])
        outputs = llm.generate(branches, SamplingParams(max_tokens=5))
        assert [o.prompt_token_ids for o in outputs] == [[97, 98, 99], [120, 121, 122]]
        assert [len(b) for b in branches] == [8, 8]
        assert branches[0].text == "abc" + outputs[0].outputs[0].text
        assert outputs[0].prompt is None
