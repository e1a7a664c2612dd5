"""Names in a configuration are looked up in transformers' own lists alone."""

import pytest

from powernorm.integrations.architectures import model_class


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("BertModel", "bert"),
        ("GPT2DoubleHeadsModel", "gpt2"),  # which no Auto class builds
        ("ClapTextModel", "clap_text_model"),  # of a family with another name
        ("BertModel", "of-somebody-else"),
    ],
)
def test_models_of_transformers_are_found(name: str, model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    assert model_class({"architectures": [name], "model_type": model_type}) is getattr(
        transformers, name
    )


@pytest.mark.parametrize(
    "name", ["Trainer", "pipeline", "os", "AutoModel", "BertConfig", "__class__", "", None, 3]
)
def test_nothing_else_is(name: object) -> None:
    pytest.importorskip("transformers")
    assert model_class({"architectures": [name], "model_type": "bert"}) is None


def test_what_is_on_no_list_is_not_even_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model class that somebody put into the module's namespace."""
    transformers = pytest.importorskip("transformers")
    planted = type("Planted", (transformers.PreTrainedModel,), {})
    monkeypatch.setattr(transformers, "Planted", planted, raising=False)
    for model_type in ("bert", "planted", None):
        assert model_class({"architectures": ["Planted"], "model_type": model_type}) is None
