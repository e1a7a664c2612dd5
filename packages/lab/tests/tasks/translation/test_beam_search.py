import itertools
from collections.abc import Iterable
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.tests.tiny_models import padding, paired, tokens, trained, translation_model
from torch import Tensor

from powernorm.errors import InputError
from powernorm.norms import BatchStatisticsNorm
from powernorm_lab.tasks.translation.model import TranslationModel
from powernorm_lab.tasks.translation.search import BeamSearch, Hypothesis, beam_search
from powernorm_lab.tasks.translation.settings import LengthNormalization

VOCABULARY = 4
SOURCE, MASK = tokens(3, 4, vocabulary=VOCABULARY), padding(4, 1, 2)
SOURCE[MASK] = 0


@cache
def toy(seed: int = 0, norm: str = "bn") -> TranslationModel:
    model = translation_model(norm, norm, vocabulary=VOCABULARY, num_layers=1, seed=seed)
    return trained(model, partial(paired, vocabulary=VOCABULARY)).double()


@torch.no_grad()
def next_log_probabilities(
    model: TranslationModel, source: Tensor, mask: Tensor, prefixes: Iterable[tuple[int, ...]]
) -> Tensor:
    """Return those of the whole model, (prefixes, vocabulary), for prefixes of equal length."""
    target = torch.tensor([(0, *prefix) for prefix in prefixes])
    many = len(target)
    logits = model(source.expand(many, -1), target, mask.expand(many, -1))
    return logits[:, -1].log_softmax(-1)


def limit_of(search: BeamSearch, source: Tensor) -> int:
    return search.limit(int((source != 0).sum()))


def exhaustive(
    model: TranslationModel, source: Tensor, mask: Tensor, search: BeamSearch
) -> list[Hypothesis]:
    """Return all translations, the best first."""
    found, totals = [], {(): 0.0}
    for length in range(limit_of(search, source) + 1):
        after = next_log_probabilities(model, source, mask, totals)
        grown = {}
        for (prefix, total), row in zip(totals.items(), after.tolist(), strict=True):
            ended = total + row[0]
            found.append(Hypothesis(prefix, ended, ended / search.divisor(float(length + 1))))
            grown |= {(*prefix, word): total + row[word] for word in range(1, VOCABULARY)}
        totals = grown
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


def by_hand(
    model: TranslationModel, source: Tensor, mask: Tensor, search: BeamSearch
) -> list[Hypothesis]:
    """Search as in the docstring with lists, without a cache and without stopping early."""
    beam: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[Hypothesis] = []
    limit = limit_of(search, source)
    for length in range(limit + 1):
        after = next_log_probabilities(model, source, mask, [prefix for _, prefix in beam])
        words = range(VOCABULARY) if length < limit else [0]
        candidates = sorted(
            (
                (total + float(row[word]), prefix, word)
                for (total, prefix), row in zip(beam, after, strict=True)
                for word in words
            ),
            reverse=True,
        )
        ended += [
            Hypothesis(prefix, total, total / search.divisor(float(length + 1)))
            for total, prefix, word in candidates[: search.beam_size]
            if word == 0
        ]
        growing = [(total, (*prefix, word)) for total, prefix, word in candidates if word != 0]
        beam = growing[: search.beam_size]
        if len(ended) >= search.beam_size:
            break
    return sorted(ended, key=lambda hypothesis: -hypothesis.score)[: search.num_best]


def assert_same(
    got: list[Hypothesis], expected: list[Hypothesis], tolerance: float = 1e-10
) -> None:
    assert [hypothesis.tokens for hypothesis in got] == [h.tokens for h in expected]
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.log_probability == pytest.approx(theirs.log_probability, abs=tolerance)
        assert ours.score == pytest.approx(theirs.score, abs=tolerance)


@pytest.mark.parametrize("normalization", ["power", "wu2016"])
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
def test_a_wide_beam_finds_the_best_of_all(
    normalization: LengthNormalization, penalty: float
) -> None:
    # The beam holds all 1 + 3 + 9 + 27 + 81 translations of at most 4 tokens.
    search = BeamSearch(121, normalization, penalty, 0.5, 2, num_best=7)
    assert [limit_of(search, row) for row in SOURCE] == [4, 2, 3]
    found = beam_search(toy(), SOURCE, MASK, search)
    for row, got in enumerate(found):
        assert_same(got, exhaustive(toy(), SOURCE[row], MASK[row], search)[:7])


def test_a_wide_beam_returns_every_translation_there_is() -> None:
    search = BeamSearch(40, max_length_factor=0, max_length_offset=2, num_best=40)
    (found,) = beam_search(toy(), SOURCE[:1], None, search)
    everything = {
        words for length in range(3) for words in itertools.product(range(1, 4), repeat=length)
    }
    assert {hypothesis.tokens for hypothesis in found} == everything
    assert sum(torch.tensor([h.log_probability for h in found]).exp()) < 1


@settings(max_examples=30)
@given(
    seed=st.integers(0, 4),
    beam_size=st.integers(1, 6),
    penalty=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    normalization=st.sampled_from(["power", "wu2016"]),
    offset=st.integers(0, 9),
    data=st.data(),
)
def test_search_against_lists(
    seed: int,
    beam_size: int,
    penalty: float,
    normalization: LengthNormalization,
    offset: int,
    data: st.DataObject,
) -> None:
    num_best = data.draw(st.integers(1, beam_size))
    search = BeamSearch(beam_size, normalization, penalty, 1.0, offset, num_best)
    model = toy(seed)
    batch = beam_search(model, SOURCE, MASK, search)
    for row, got in enumerate(batch):
        assert_same(got, by_hand(model, SOURCE[row], MASK[row], search))
        length = int((~MASK[row]).sum())
        (alone,) = beam_search(model, SOURCE[row : row + 1, :length], None, search)
        assert_same(got, alone)


@pytest.mark.parametrize("norm", ["ln", "bn", "pn"])
def test_a_beam_of_one_is_greedy(norm: str) -> None:
    search = BeamSearch(1, max_length_factor=2.0, max_length_offset=3)
    for seed in range(3):
        model = toy(seed, norm)
        for row, (got,) in enumerate(beam_search(model, SOURCE, MASK, search)):
            prefix: tuple[int, ...] = ()
            while len(prefix) < limit_of(search, SOURCE[row]):
                after = next_log_probabilities(model, SOURCE[row], MASK[row], [prefix])
                if not (word := int(after.argmax())):
                    break
                prefix = (*prefix, word)
            assert got.tokens == prefix


def endless() -> TranslationModel:
    """Return a model that almost never ends a sentence, so that the search must end hypotheses."""
    model = translation_model(vocabulary=VOCABULARY, shared_embeddings="none").double()
    with torch.no_grad():
        assert model.decoder.norm is not None
        model.decoder.norm.bias[0] = 20.0
        model.head.weight[:, 0] = torch.tensor([-1.0, 0.5, 0.5, 0.5])
    return model.eval()


@torch.no_grad()
def test_a_hypothesis_at_its_greatest_length_is_ended() -> None:
    search = BeamSearch(3, "power", 1.0, 2.0, 1, num_best=3)
    model = endless()
    for row, got in enumerate(beam_search(model, SOURCE, MASK, search)):
        assert [len(hypothesis.tokens) for hypothesis in got] == [limit_of(search, SOURCE[row])] * 3
        for hypothesis in got:
            target = torch.tensor([(0, *hypothesis.tokens)])
            after = model(SOURCE[row : row + 1], target, MASK[row : row + 1]).log_softmax(-1)[0]
            chosen = after[range(target.shape[1]), [*hypothesis.tokens, 0]]
            assert hypothesis.log_probability == pytest.approx(float(chosen.sum()))
            assert hypothesis.score == pytest.approx(float(chosen.sum()) / target.shape[1])


def test_end_marks_and_padding_do_not_count_in_the_length_of_a_source() -> None:
    search = BeamSearch(2, max_length_factor=2.0, max_length_offset=0)
    source = torch.tensor([[1, 2, 0, 3], [3, 1, 2, 0], [1, 1, 1, 1]])
    found = beam_search(endless(), source, padding(3, 4, 0), search)
    assert [len(best.tokens) for (best,) in found] == [4, 6, 0]


def rows_of_each_step(model: TranslationModel, search: BeamSearch, source: Tensor) -> list[int]:
    rows: list[int] = []
    watch = model.head.register_forward_hook(lambda *call: rows.append(len(call[2])))
    try:
        beam_search(model, source, None, search)
    finally:
        watch.remove()
    return rows


def test_finished_sentences_leave_the_batch() -> None:
    model, search = endless(), BeamSearch(2, max_length_factor=1.0, max_length_offset=0)
    source = torch.tensor([[1, 0, 0, 0], [1, 2, 0, 0], [1, 2, 3, 1]])
    assert rows_of_each_step(model, search, source) == [3, 3, 2, 1, 1]


def test_the_search_stops_when_no_live_hypothesis_can_win() -> None:
    model = toy(seed=3)
    long = BeamSearch(5, "power", 0.0, 0.0, 200)
    best = beam_search(model, SOURCE, MASK, long)
    steps = rows_of_each_step(model, long, SOURCE)
    assert len(steps) < long.max_length_offset
    assert all(len(hypothesis.tokens) < len(steps) for (hypothesis,) in best)


def test_modes_and_statistics_are_left_as_they_were() -> None:
    model = translation_model("bn", "pn", dropout=0.5).train()
    norm = model.encoder.norm
    assert isinstance(norm, BatchStatisticsNorm)
    norm.freeze_statistics()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    modes = [module.training for module in model.modules()]
    first = beam_search(model, tokens(2, 4))
    assert first == beam_search(model.eval(), tokens(2, 4))  # nothing is dropped
    model.train()
    with pytest.raises(InputError, match="source has shape"):
        beam_search(model, tokens(2, 4)[0])
    assert [module.training for module in model.modules()] == modes
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    norm.unfreeze_statistics()
    assert norm.training


def test_a_diverged_model_gives_empty_translations() -> None:
    model = translation_model()
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)
    nothing = [Hypothesis((), -torch.inf, -torch.inf)]
    assert beam_search(model, tokens(2, 4)) == [nothing, nothing]


def test_reduced_precision_finds_nearly_as_good_translations() -> None:
    model = trained(translation_model("bn", seed=1), paired)
    search = BeamSearch(4, "power", 1.0, 1.0, 2)
    source, mask = tokens(5, 4), padding(4, 4, 3, 2, 1)
    expected = beam_search(model, source, mask, search)
    with torch.autocast("cpu", torch.bfloat16):
        found = beam_search(model, source, mask, search)
    for (ours,), (theirs,) in zip(found, expected, strict=True):
        assert ours.score == pytest.approx(theirs.score, abs=0.12)
    halved = beam_search(model.bfloat16(), source, mask, search)
    for (ours,), (theirs,) in zip(halved, expected, strict=True):
        assert ours.score == pytest.approx(theirs.score, abs=0.12)


@pytest.mark.gpu
def test_a_gpu_finds_what_the_cpu_finds() -> None:
    search = BeamSearch(5, num_best=3)
    model = trained(translation_model("bn", "pn"), paired).double()
    source, mask = tokens(6, 7), padding(7, 7, 5, 3, 2, 1)
    expected = beam_search(model, source, mask, search)
    found = beam_search(model.cuda(), source.cuda(), mask.cuda(), search)
    # Positions are float32, and a GPU's sine may differ in the last bit: here by 2e-7 in total.
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs, 5e-6)


def test_no_sentences() -> None:
    assert beam_search(toy(), SOURCE[:0]) == []


def test_bad_settings_are_named() -> None:
    for wrong, message in (
        ({"beam_size": 0}, "beam_size=0 must be 1 or more"),
        ({"beam_size": 3, "num_best": 4}, "num_best=4 must be from 1 to beam_size=3"),
        ({"num_best": 0}, "num_best=0 must be from 1"),
        ({"length_normalization": "wu"}, "length_normalization='wu' must be one of power, wu2016"),
        ({"length_penalty": -0.5}, "length_penalty=-0.5 must be 0 or more"),
        ({"length_penalty": float("nan")}, "length_penalty=nan must be"),
        ({"max_length_factor": float("inf")}, "max_length_factor=inf must be"),
    ):
        with pytest.raises(InputError, match=message):
            BeamSearch(**wrong)  # type: ignore[arg-type]


def test_divisors() -> None:
    assert BeamSearch(length_penalty=0.5).divisor(9.0) == 3
    assert BeamSearch(length_normalization="wu2016", length_penalty=2).divisor(7.0) == 4
    lengths = torch.tensor([1.0, 4.0])
    assert BeamSearch().divisor(lengths).tolist() == [1, 4]
