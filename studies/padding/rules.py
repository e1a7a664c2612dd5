"""The arms and measures of the study, written before anything was trained.

Every arm is a Conformer of two layers that differs in the norm of its convolution modules alone.
Its learning rate is the best of `RATES` by the loss of the held-out utterances, mean of
`TUNING_SEEDS`, for each batch size in random batches; the same rate serves sorted ones. Then it is
trained with each of `SEEDS`. A difference between two arms is the mean over seeds of the paired
differences with the two-sided 95 % interval of Student's t; where the interval has 0 in it, the
page says "no difference". All 370 test utterances are scored after the last update:

- `alone`: without padding;
- `padded`: in random batches of 64, always the same; of a training with order `fixed` padded as
  that was;
- `bucket`: in batches of 64 of like length.

The order `fixed` is random batches that are padded to `FIXED_LENGTH` frames, as models with one
input size have them. It was added after the rows of the other settings had been seen, and before
any of its own.

Sensitivity is the number of answers that differ from those of `alone`, and the largest difference
of a logit. Running and batch statistics are compared on the random batches.
"""

ORDERS = {"random": False, "sorted": True, "fixed": False}
"""Whether batches have utterances of similar length."""
FIXED_LENGTH = 40
BATCH_SIZES = (4, 16, 64)
STEPS = {4: 320, 16: 160, 64: 80}
"""Updates of a run: 6, 12 and 24 passes over the training utterances."""
RATES = (1e-3, 3e-3, 1e-2)
TUNING_SEEDS = (100,)
SEEDS = range(10)
SETTINGS = (("random", 4), ("random", 16), ("random", 64), ("sorted", 16), ("fixed", 16))
"""Sorted batches at one batch size: the padding share hardly depends on the order at 4."""
EVALUATION_SIZE = 64
TID_BATCHES = 20

REPAIRS = (
    (),
    ("fine-tune",),
    ("mask",),
    ("mask", "calibrate"),
    ("mask", "fine-tune"),
    ("mask", "calibrate", "fine-tune"),
    ("mask", "fine-tune", "calibrate"),
)
"""Sequences of repairs of a model that was trained with `bn` in random batches of 16."""
FINE_TUNING_STEPS = 32
"""A fifth of the training, at a tenth of its rate, constant."""
