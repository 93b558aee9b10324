"""Branches: what each verb does to tokens, seeds, KV and relatives."""

from __future__ import annotations

import time

import pytest
from api_helpers import Gate, counting, eventually, is_idle, letters, scripted

from cotrt import Branches, BranchPrunedError, InvalidRequestError, PromptTooLongError

TEXT = "the quick brown fox jumps over the lazy dog and then some more"


def test_fork_at_shares_what_came_before_and_nothing_else():
    with scripted() as llm:
        root = llm.branch(TEXT)
        root.generate(max_tokens=20).result()
        for at in (0, 1, 15, 16, 17, 40, len(root)):
            child = root.fork(at=at)[0]
            assert child.token_ids == root.token_ids[:at] and child.depth == 1
            assert child.parent is root and child.kv.private_blocks == 0
            if at:
                fresh = llm.branch(root.token_ids[:at])
                assert child.generate(max_tokens=5, seed=3).result().text == (
                    fresh.generate(max_tokens=5, seed=3).result().text
                )
        for at in (-1, len(root) + 1, 1.0, True):
            with pytest.raises(InvalidRequestError, match="at="):
                root.fork(at=at)
        for n in (0, -1, 1.0, True):
            with pytest.raises(InvalidRequestError, match="n"):
                root.fork(n)


def test_children_of_a_running_branch_have_its_tokens_as_published():
    gate = Gate()
    with scripted(gate) as llm:
        root = llm.branch("abc")
        work = root.generate(max_tokens=50)
        chunks = iter(work)
        next(chunks)
        gate.shut()
        assert gate.reached.wait(20)
        child = root.fork()[0]
        length = len(child)
        assert child.token_ids == root.token_ids[:length] and length > 3
        gate.open.set()
        work.result()
        assert len(child) == length
        assert child.generate(max_tokens=4).result().text == root.text[length : length + 4]


def test_forks_before_any_token_is_computed_share_that_computation():
    with scripted(letters) as llm:
        children = llm.branch(TEXT).fork(8)
        children.generate(max_tokens=3).result()
        assert llm.metrics["prompt_tokens_computed"] == len(TEXT)


@pytest.mark.parametrize("length", [0, 3, 16, 20, 32, 33, 60])
def test_truncate_below_the_fork_point_and_inside_a_sealed_block(length):
    with scripted(letters) as llm:
        root = llm.branch(TEXT)
        root.score("x").result()  # now its KV is there
        child, sibling = root.fork(2)
        child.generate(max_tokens=20).result()
        sibling.generate(max_tokens=20).result()
        kept = sibling.token_ids
        assert child.truncate(length) is child
        assert child.token_ids == root.token_ids[:length] and child.text == TEXT[:length]
        child.extend("?")
        text = child.generate(max_tokens=30, seed=9).result().text
        alone = llm.branch(TEXT[:length] + "?").generate(max_tokens=30, seed=9).result().text
        assert text == alone
        assert sibling.token_ids == kept and root.text == TEXT
        llm._runtime.engine.check_invariants()
        for bad in (-1, len(child) + 1, "3"):
            with pytest.raises(InvalidRequestError, match="length="):
                child.truncate(bad)


def test_extend_past_the_context_appends_nothing():
    with scripted(max_model_len=20) as llm:
        branch = llm.branch("a" * 15)
        with pytest.raises(PromptTooLongError, match=r"21.*20"):
            branch.extend("b" * 6)
        assert branch.text == "a" * 15
        with pytest.raises(PromptTooLongError):
            branch.score("b" * 6)
        with pytest.raises(PromptTooLongError):
            branch.choose(["b", "c" * 6])
        branch.extend("b" * 5)
        with pytest.raises(PromptTooLongError, match="room"):
            branch.generate()
        assert branch.generate(max_tokens=0).result().token_ids == []


def test_an_empty_root_must_be_extended_first():
    with scripted(counting) as llm:
        branch = llm.branch()
        assert len(branch) == 0 and branch.text == ""
        for call in (branch.generate, lambda: branch.score("a"), lambda: branch.choose(["a"])):
            with pytest.raises(InvalidRequestError):
                call()
        assert branch.score("b", given="a").result().logprobs is not None
        assert branch.extend("a").generate(max_tokens=2).result().text == "bc"


def test_prune_cuts_the_subtree_is_idempotent_and_frees_at_once():
    with scripted(letters) as llm:
        root = llm.branch(TEXT)
        children = root.fork(3)
        grandchildren = children[0].fork(2)
        grandchildren.generate(max_tokens=40).result()
        before = llm.memory().in_use
        children[0].prune()
        children[0].prune()
        assert llm.memory().in_use < before
        assert [b.alive for b in (*children, *grandchildren)] == [False, True, True, False, False]
        assert [c.id for c in root.children] == [children[1].id, children[2].id]
        for call in (
            grandchildren[0].fork,
            lambda: grandchildren[0].extend("a"),
            lambda: grandchildren[0].truncate(0),
            lambda: grandchildren[0].generate(),
            lambda: grandchildren[0].score("a"),
            lambda: grandchildren[0].choose(["a"]),
            lambda: grandchildren[0].keep(1),
        ):
            with pytest.raises(BranchPrunedError, match="pruned"):
                call()
        assert grandchildren[0].text.startswith(TEXT) and len(grandchildren[0]) == len(TEXT) + 40
        grandchildren[0].close()
        root.prune()
        assert is_idle(llm)


def test_close_gives_up_the_handle_and_lets_descendants_and_running_work_live():
    gate = Gate()
    with scripted(gate) as llm:
        root = llm.branch("abc")
        child = root.fork()[0]
        gate.shut()
        work = root.generate(max_tokens=5)
        root.close()
        root.close()
        assert not root.alive and child.parent is not None
        with pytest.raises(BranchPrunedError, match="closed"):
            root.extend("x")
        gate.open.set()
        assert len(work.result().token_ids) == 5
        again = child.parent
        assert again is not None and again.id == root.id and again.alive
        assert again.fork()[0].text == root.text
        assert child.generate(max_tokens=2).result().text == "de"


def test_a_closed_handle_has_nothing_left_to_prune():
    with scripted() as llm:
        root = llm.branch("abc")
        child = root.fork()[0]
        root.close()
        root.prune()
        assert child.alive and child.generate(max_tokens=2).result().finish_reason == "length"
        with llm.branch("abc") as left:
            second = left.fork()[0]
            left.close()
        with llm.branch("abc").fork(2) as pair:
            third = pair[1].fork()[0]
            pair[1].close()
        with llm.start_chat(chat_template="{{ messages[0].content }}") as chat:
            chat.send("abc", max_tokens=1).result()
            fourth = chat.branch.fork()[0]
            chat.branch.close()
        assert second.alive and third.alive and fourth.alive and not pair[0].alive
        again = child.parent
        assert again is not None
        again.prune()  # a handle made since does prune
        again.close()
        again.prune()
        assert not child.alive


def test_with_blocks_prune_whatever_happens():
    with scripted() as llm:
        with (  # noqa: PT012
            pytest.raises(LookupError),
            llm.branch("a") as root,
            root.fork(3) as children,
        ):
            grown = children.fork(2)
            grown.generate(max_tokens=5)
            raise LookupError
        assert not any(b.alive for b in (root, *children, *grown))
        assert eventually(lambda: is_idle(llm))


def test_branches_are_a_sequence_with_the_same_verbs():
    with scripted(counting) as llm:
        root = llm.branch("a")
        branches = root.fork(4)
        assert len(branches) == 4 and branches[0] in branches
        assert isinstance(branches[1:3], Branches) and list(branches[1:3]) == list(branches)[1:3]
        assert branches.index(branches[2]) == 2 and next(reversed(branches)) is branches[3]
        branches.extend(["b", "c", "d", "e"])
        assert [b.text for b in branches] == ["ab", "ac", "ad", "ae"]
        branches.extend("z").extend([122])
        assert branches[0].text == "abzz"
        with pytest.raises(InvalidRequestError, match="2 texts for 4"):
            branches.extend(["x", "y"])
        scores = branches.score("e").result()
        assert len(scores) == 4 and scores[0].token_ids == [101]
        both = branches.score(["e", "f"]).result()
        assert [len(each) for each in both] == [2] * 4
        choices = branches[:2].choose(["e", "x"]).result()
        assert [c.option for c in choices] == ["e", "e"]
        assert len(branches.fork(2)) == 8
        outputs = branches.generate(max_tokens=2).result()
        assert len(outputs) == 4
        sequence = Branches(iter(branches))
        sequence.truncate(1)
        assert {b.text for b in branches} == {"a"}
        sequence.prune()
        assert not any(b.alive for b in branches)


def test_identity_relatives_and_metadata():
    with scripted() as llm:
        root = llm.branch("a")
        child = root.fork()[0]
        assert child.parent is root and root.parent is None and list(root.children) == [child]
        assert (root.depth, child.depth) == (0, 1) and root.id != child.id
        child.metadata["score"] = 3
        identity = child.id
        grandchild = child.fork()[0]
        del child
        assert grandchild.parent.id == identity
        assert grandchild.parent.metadata == {"score": 3}
        assert grandchild.metadata == {}
        assert bool(root) and str(root.id) in repr(root) and "alive" in repr(root)


def test_choose_appends_the_best_option_and_refuses_equal_ones():
    with scripted(counting) as llm:
        branch = llm.branch("a")
        choice = branch.choose(["x", [98], "b"[:0] + "bc"]).result()
        assert choice.index == 1 and choice.option == [98] and branch.text == "ab"
        ties = llm.branch("a").choose(["x", "y"]).result()
        assert ties.index == 0  # both impossible: the first
        for options, says in (
            (["a", "a"], "equal"),
            (["a", [97]], "equal"),
            ([], "at least one"),
            ("ab", "list"),
            ([""], "no tokens"),
        ):
            with pytest.raises(InvalidRequestError, match=says):
                branch.choose(options)
        with pytest.raises(InvalidRequestError, match="normalize"):
            branch.choose(["a"], normalize="max")


def test_score_takes_one_or_many_texts_or_ids():
    import numpy as np

    with scripted(counting) as llm:
        branch = llm.branch("a")
        assert branch.score("b").result().total == 0.0
        assert branch.score([98, 99]).result().token_ids == [98, 99]
        assert branch.score(np.array([98, 99])).result().token_ids == [98, 99]
        assert [s.token_ids for s in branch.score([[98], "bc"]).result()] == [[98], [98, 99]]
        assert branch.score([]).result() == []
        for bad, says in (
            (["b", ""], "no tokens"),
            (3, "int"),
            ([98, "b"], "must be"),
            (b"b", "bytes"),
        ):
            with pytest.raises(InvalidRequestError, match=says):
                branch.score(bad)
        assert len(branch) == 1 and llm.metrics["generated_tokens"] == 0


def test_keep_makes_others_go_first_and_is_bounded_by_half_of_the_pool():
    block = 16 * 4
    with scripted(letters, kv_cache_memory_bytes=8 * block) as llm:
        kept, other = llm.branch("k" * 40), llm.branch("o" * 40)
        for branch in (kept, other):
            branch.score("x").result()
        kept.keep(60)
        with pytest.raises(InvalidRequestError, match=r"keep.*4 of 8"):
            other.keep(60)
        big = llm.branch("b" * 70)
        big.generate(max_tokens=5).result()
        assert kept.kv.location == "device" and other.kv.location == "none"
        assert other.generate(max_tokens=2).result().token_ids  # it comes back
        kept.keep(0)
        other.keep(60)
        for bad in (-1, "1", True, float("nan")):
            with pytest.raises(InvalidRequestError, match="seconds"):
                kept.keep(bad)


def test_a_lease_ends_by_itself():
    with scripted(letters, kv_cache_memory_bytes=8 * 64) as llm:
        first, second = llm.branch("k" * 40), llm.branch("o" * 40)
        for branch in (first, second):
            branch.score("x").result()
        first.keep(0.02)
        time.sleep(0.05)
        second.keep(60)


def test_kv_says_where_a_branch_is():
    with scripted(letters) as llm:
        root = llm.branch("a" * 40)
        assert root.kv.location == "none" and root.kv.num_tokens == 40
        root.score("x").result()
        child = root.fork()[0]
        child.generate(max_tokens=20).result()
        kv = child.kv
        assert (kv.num_tokens, kv.computed_tokens, kv.location) == (60, 59, "device")
        assert kv.blocks == 4 and kv.shared_blocks == 2 and kv.private_blocks == 2
        assert kv.bytes == 4 * 16 * 4
