"""Text to ids and back, for both kinds of vocabulary that llama files carry."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_bench.demo.gguf_file import GgufFile
from paged_bench.demo.pretokenizers import pre_tokenizer
from paged_bench.demo.tokenizer import TextCodec
from paged_bench.errors import ModelFileError, PromptError

SPACE = "\u2581"


@pytest.fixture(scope="module")
def codec(tiny_path):
    return TextCodec(GgufFile(tiny_path))


@settings(deadline=None, max_examples=100)
@given(st.text(min_size=1, max_size=40))
def test_bytes_survive_the_round_trip(codec, text):
    assert codec.decode(codec.encode(text)) == text


def test_merges_apply_in_order(codec):
    assert codec.decode(codec.encode("the")) == "the"
    assert len(codec.encode("the")) == 1
    assert len(codec.encode("in the an")) == 4


def test_control_tokens_are_read_and_written(codec):
    ids = codec.encode("<|start|>a<|end|>")
    assert (ids[0], ids[-1]) == (1, 0)
    assert codec.decode(ids) == "<|start|>a<|end|>"


def test_digits_stand_alone(codec):
    assert len(codec.encode("12345")) == 5


@pytest.mark.parametrize("text", ["", "\udcff"])
def test_no_text_is_refused(codec, text):
    with pytest.raises(PromptError):
        codec.encode(text)


def test_the_file_may_ask_for_a_first_token(tmp_path, tiny_model):
    path = tiny_model(keys={"tokenizer.ggml.add_bos_token": True}).write(tmp_path / "m")
    codec = TextCodec(GgufFile(path))
    assert codec.encode("a")[0] == 1


def sentence_piece(tiny_model, **keys):
    """A vocabulary with scores: longer pieces are better, except one that must lose."""
    model = tiny_model()
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = {
        SPACE: -9,
        "a": -8,
        "b": -8,
        "c": -8,
        "ab": -1,
        "bc": -2,
        "abc": -5,
        f"{SPACE}a": -4,
        f"{SPACE}ab": -3,
    }
    scores = [0.0] * len(pieces) + [float(score) for score in words.values()]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(words)
    model.keys |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*pieces, *words],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        **keys,
    }
    del model.keys["tokenizer.ggml.pre"], model.keys["tokenizer.ggml.merges"]
    return model, [*pieces, *words]


def greedy_pieces(text, pieces, scores):
    """SentencePiece's rule, naively: join the best-scored adjacent pair, the leftmost among equals."""
    parts = list(text)
    while True:
        best = [
            (scores[left + right], -place)
            for place, (left, right) in enumerate(pairwise(parts))
            if left + right in scores
        ]
        if not best:
            return [pieces.index(part) for part in parts]
        place = -max(best)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@settings(deadline=None, max_examples=100)
@given(text=st.text(alphabet="abc ", min_size=1, max_size=20))
def test_scores_decide_as_sentence_piece_does(tmp_path_factory, tiny_model, text):
    model, pieces = sentence_piece(tiny_model)
    scores = dict(zip(pieces[259:], model.keys["tokenizer.ggml.scores"][259:], strict=True))
    codec = TextCodec(GgufFile(model.write(tmp_path_factory.mktemp("spm") / "m")))
    ids = codec.encode(text)
    assert ids[0] == 1
    assert ids[1:] == greedy_pieces((" " + text).replace(" ", SPACE), pieces, scores)
    assert codec.decode(ids[1:]) == text


def test_unknown_characters_fall_back_to_bytes(tmp_path, tiny_model):
    model, _ = sentence_piece(tiny_model)
    codec = TextCodec(GgufFile(model.write(tmp_path / "m")))
    ids = codec.encode("é")
    assert [index - 3 for index in ids[2:]] == list("é".encode())
    assert codec.decode(ids[1:]) == "é"


def test_missing_scores_are_named(tmp_path, tiny_model):
    model, _ = sentence_piece(tiny_model)
    del model.keys["tokenizer.ggml.scores"]
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.scores"):
        TextCodec(GgufFile(model.write(tmp_path / "m")))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "gpt-2",
            [
                "I",
                "'ll",
                " pay",
                " 12345",
                " now",
                ",",
                " THEY",
                "'",
                "LL",
                "  ",
                " see",
                "!!",
                "\n",
                "\n",
                "x",
            ],
        ),
        (
            "smollm",
            [
                "I",
                "'ll",
                " pay",
                " ",
                *"12345",
                " now",
                ",",
                " THEY",
                "'",
                "LL",
                "  ",
                " see",
                "!!",
                "\n",
                "\n",
                "x",
            ],
        ),
        (
            "llama-bpe",
            ["I", "'ll", " pay", " ", "123", "45", " now", ",", " THEY", "'LL", "  ", " see", "!!\n\n", "x"],
        ),
    ],
)
def test_each_pre_tokenizer_splits_its_own_way(name, expected):
    text = "I'll pay 12345 now, THEY'LL   see!!\n\nx"
    pieces = [text[start:end] for _, (start, end) in pre_tokenizer(name).pre_tokenize_str(text)]
    assert pieces == expected


@pytest.mark.parametrize("name", ["llama-bpe", "gpt-2"])
def test_some_vocabularies_start_with_bos_unless_the_file_says_otherwise(tmp_path, tiny_model, name):
    model = tiny_model(keys={"tokenizer.ggml.pre": name})
    del model.keys["tokenizer.ggml.add_bos_token"]
    codec = TextCodec(GgufFile(model.write(tmp_path / "m")))
    assert (codec.encode("a")[0] == 1) == (name == "llama-bpe")


def test_a_piece_that_comes_twice_is_refused(tmp_path, tiny_model):
    model = tiny_model()
    model.keys["tokenizer.ggml.tokens"][5] = model.keys["tokenizer.ggml.tokens"][6]
    with pytest.raises(ModelFileError, match="more than once"):
        TextCodec(GgufFile(model.write(tmp_path / "m")))


def test_an_end_token_may_have_a_second_name(tmp_path, tiny_model):
    path = tiny_model(keys={"tokenizer.ggml.eot_token_id": 7}).write(tmp_path / "m")
    assert TextCodec(GgufFile(path)).stop_ids == {0, 7}
