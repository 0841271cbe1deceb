"""Where prompts come from, and what is refused."""

import pytest
from paged_bench.demo.prompts import BUILT_IN, DEFAULT_MAX_NEW, gather_prompts
from paged_bench.errors import PromptError


def test_the_built_in_prompts_end_at_different_lengths():
    prompts = gather_prompts((), None, None)
    assert prompts == list(BUILT_IN)
    assert len(prompts) >= 8
    assert len({limit for _, limit in prompts}) == len(prompts)


def test_the_command_line_comes_before_the_file(tmp_path):
    file = tmp_path / "prompts"
    file.write_text("one\n two \nthree\n", encoding="utf-8")
    prompts = gather_prompts(("zero",), file, None)
    assert prompts == [(text, DEFAULT_MAX_NEW) for text in ("zero", "one", " two ", "three")]


def test_a_limit_holds_for_every_prompt():
    assert {limit for _, limit in gather_prompts((), None, 3)} == {3}


@pytest.mark.parametrize("content", [b"", b"\n\n", b"one\n\ntwo\n", b"caf\xe9\n"])
def test_a_bad_prompts_file_is_refused_by_name(tmp_path, content):
    file = tmp_path / "prompts"
    file.write_bytes(content)
    with pytest.raises(PromptError, match="prompts"):
        gather_prompts((), file, None)


def test_an_unreadable_prompts_file(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(PromptError, match=path.name):
            gather_prompts((), path, None)


def test_an_empty_prompt_is_refused_by_its_place():
    with pytest.raises(PromptError, match="prompt 2"):
        gather_prompts(("one", ""), None, None)
