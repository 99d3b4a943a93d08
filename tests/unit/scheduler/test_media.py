"""Images in sequences of tokens: two images never look alike, and no prefix ends inside one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotkeeper.scheduler.prompts.prompt_tree import PromptTree
from slotkeeper.scheduler.prompts.tokens import Chunk, Tokens, prompt_end, text_ranges
from slotkeeper.scheduler.slots.engine_model import (
    EngineTraits,
    Memory,
    SlotContents,
    after_prefill,
    foreign_token,
    marked,
    reuse,
)

A, B = b"a" * 32, b"b" * 32
TEXT, QUESTION = Tokens(range(1000, 1020)), Tokens(range(2000, 2010))


def prompt_with(digest: bytes, length: int = 10, *, question: Tokens = QUESTION) -> Tokens:
    return TEXT + Tokens.image(digest, length) + question


class TestNumbers:
    @given(st.binary(min_size=32, max_size=32), st.integers(1, 5000))
    def test_the_numbers_of_an_image_are_no_token_ids(self, digest, length):
        numbers = Tokens.image(digest, length).ids()
        assert len(numbers) == length
        assert max(numbers) < -1

    def test_another_image_or_length_differs_from_the_first_number_on(self):
        firsts = {Tokens.image(digest, length)[0] for digest in (A, B) for length in (9, 10, 11)}
        assert len(firsts) == 6

    def test_the_same_image_has_the_same_numbers(self):
        assert prompt_with(A) == prompt_with(A)
        assert prompt_with(A) != prompt_with(B)


class TestPlaces:
    def test_the_place_of_an_image_moves_with_its_sequence(self):
        twice = prompt_with(A) + prompt_with(B)
        assert twice.chunks == (Chunk(20, 10, A), Chunk(60, 10, B))
        assert twice.cut(15, 65).chunks == (Chunk(5, 10, A), Chunk(45, 10, B))
        assert twice.cut(25).chunks[0] == Chunk(-5, 10, A)
        assert twice.cut(30, 60).chunks == ()
        assert twice.within("anna").chunks == twice.chunks

    @pytest.mark.parametrize(("at", "ends"), [(20, 20), (21, 20), (25, 20), (30, 20), (31, 31), (40, 40)])
    def test_a_prompt_does_not_end_inside_an_image_or_right_behind_it(self, at, ends):
        prompt = prompt_with(A)
        assert prompt_end(prompt.chunks, at) == ends
        assert prompt.may_end(at) == (at == ends)

    @pytest.mark.parametrize(("at", "ends"), [(20, 20), (29, 20), (30, 30), (31, 31)])
    def test_a_prompt_may_end_right_behind_an_image_that_text_is_known_to_follow(self, at, ends):
        prompt = TEXT + Tokens.image(A, 10, closed=True) + QUESTION
        assert prompt_end(prompt.chunks, at) == ends
        assert prompt.may_end(at) == (at == ends)
        assert prompt == prompt_with(A)

    def test_a_prompt_does_not_end_right_behind_two_adjacent_images(self):
        prompt = TEXT + Tokens.image(A, 10) + Tokens.image(B, 10) + QUESTION
        assert prompt_end(prompt.chunks, 40) == 20

    def test_texts_are_the_ranges_without_images(self):
        twice = prompt_with(A) + prompt_with(B)
        assert [*text_ranges(twice.chunks, len(twice))] == [(0, 20), (30, 60), (70, 80)]


class TestCommonPrefixes:
    def test_prompts_with_different_images_share_the_text_before_the_image(self):
        assert prompt_with(A).lcp(prompt_with(B)) == 20

    def test_prompts_with_the_same_image_and_different_questions_share_the_image(self):
        assert prompt_with(A).lcp(prompt_with(A, question=Tokens([7, 8]))) == 30

    def test_an_image_of_another_length_shares_only_the_text_before_it(self):
        assert prompt_with(A, 10).lcp(prompt_with(A, 12)) == 20
        assert prompt_with(A, 12).lcp(prompt_with(A, 10)) == 20

    @pytest.mark.parametrize("cut", range(20, 31))
    def test_a_sequence_cut_inside_an_image_shares_none_of_the_image(self, cut):
        common = 30 if cut == 30 else 20
        assert prompt_with(A).cut(0, cut).lcp(prompt_with(A)) == common
        assert prompt_with(A).lcp(prompt_with(A).cut(0, cut)) == common

    @given(
        st.lists(st.sampled_from([A, B, None]), max_size=6),
        st.lists(st.sampled_from([A, B, None]), max_size=6),
    )
    def test_common_prefixes_never_end_inside_an_image(self, one, other):
        def prompt(parts):
            made = TEXT
            for part in parts:
                made += Tokens([5, 6, 7]) if part is None else Tokens.image(part, 10)
            return made

        first, second = prompt(one), prompt(other)
        same = [ours == theirs for ours, theirs in zip(one, other, strict=False)]
        alike = same.index(False) if False in same else len(same)
        assert first.lcp(second) == second.lcp(first) == len(prompt(one[:alike]))

    def test_the_prompt_tree_finds_common_prefixes_of_images(self):
        tree = PromptTree()
        tree.add(prompt_with(A))
        assert tree.longest(prompt_with(B)) == 20
        assert tree.longest(prompt_with(A, question=Tokens([7, 8]))) == 30
        assert [branch.at for branch in tree.branches(prompt_with(B))] == [20]

    def test_the_prompt_tree_cuts_a_hashed_prefix_before_the_image(self):
        tree, long = PromptTree(warm=0), Tokens(range(100))
        prompt = long + Tokens.image(A, 1000) + Tokens(range(500))
        tree.add(prompt)
        tree.add(Tokens([9]))
        assert tree.longest(prompt.cut(0, 700)) == 100
        assert tree.longest(prompt) == len(prompt)


@pytest.mark.parametrize("memory", [Memory.DENSE, Memory.HYBRID])
def test_another_image_is_not_reused(memory):
    held = SlotContents(tokens=prompt_with(A))
    traits = EngineTraits(memory=memory)
    assert reuse(held, prompt_with(B), traits) <= 20
    assert reuse(held, prompt_with(A) + QUESTION, traits) == len(prompt_with(A))


class TestCheckpointsOfTheEngine:
    """What was measured (engine.md 15). The image has 100 tokens, and 7 and 9 of text around it."""

    def left(self, end: int, chunk: Chunk, starts: tuple[int, ...] = (), reused: int = 0) -> list[int]:
        traits = EngineTraits(memory=Memory.HYBRID, eager_thinning=False)
        made = after_prefill(
            (), reuse=reused, end=end, user_starts=starts, task=1, traits=traits, images=(chunk,)
        )
        return [checkpoint.at for checkpoint in made]

    def test_no_checkpoint_is_made_at_the_image(self):
        assert self.left(1612, Chunk(1480, 116, A), starts=(1257,)) == [1096, 1257, 1608]

    def test_a_checkpoint_is_right_behind_the_image_for_a_prompt_that_ends_four_tokens_later(self):
        assert self.left(1586, Chunk(1474, 108, A))[-1] == 1582

    def test_a_checkpoint_is_before_the_image_for_a_prompt_that_ends_there(self):
        assert self.left(1485, Chunk(1481, 108, A))[-1] == 1481

    def test_an_image_that_covers_other_checkpoint_places_leaves_the_last_checkpoint(self):
        assert self.left(2000, Chunk(1000, 990, A)) == [1996]

    def test_reused_tokens_may_end_behind_the_image(self):
        assert self.left(1612, Chunk(1480, 116, A), reused=1596) == [1596, 1608]


def test_foreign_tokens_are_token_ids_and_no_images():
    prompt = Tokens([5]) + Tokens.image(A, 10) + Tokens([6])
    assert foreign_token(prompt) == Tokens([6])
    assert foreign_token(prompt.cut(0, 11)) == Tokens([5])
    assert marked(prompt).cut(12).ids() == [5] * 4
