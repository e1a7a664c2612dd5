"""Settings of masked language modeling."""

from typing import ClassVar

from powernorm.lab.settings.comparison import ComparisonSettings
from powernorm.lab.settings.model import TransformerSettings
from powernorm.lab.settings.section import section
from powernorm.lab.settings.training import SmoothedTrainingSettings
from powernorm.lab.tasks.text_settings import SubwordDataSettings


@section()
class MaskedLanguageModelSettings(ComparisonSettings):
    """Settings of `powernorm compare mlm`."""

    task: ClassVar[str] = "mlm"
    data: SubwordDataSettings = SubwordDataSettings()
    model: TransformerSettings = TransformerSettings()
    training: SmoothedTrainingSettings = SmoothedTrainingSettings()
