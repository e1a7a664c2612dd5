"""Classes of transformers by their names in a `config.json` that anyone may have written."""

from typing import Any

from powernorm.integrations.extras import needed_for


def model_class(name: object) -> Any:
    """Return the model class of transformers that a name stands for; None for any other name.

    Raises:
        ModuleNotFoundError: transformers is missing.
    """
    with needed_for("a Hugging Face model"):
        import transformers
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    return kind if is_model else None
