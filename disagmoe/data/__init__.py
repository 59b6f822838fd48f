"""Training data: packed documents as fixed-length samples, addressed by global sample index.

    text (files, standard library, synthetic, Hugging Face)     documents.py, streaming.py
      -> tokens of each document                                 tokenizers.py
        -> one packed stream, cut into samples                   packing.py (random access), streaming.py (forward only)

A sample depends on the data, `seq_len` and the seed only, never on workers, groups or ranks: every layout and
`mode = "none"` train on the same tokens in the same step.
"""

from __future__ import annotations

from disagmoe.data.build import build_dataset
from disagmoe.data.sample import IGNORE_INDEX, Batch, Sample, SampleSource

__all__ = ["IGNORE_INDEX", "Batch", "Sample", "SampleSource", "build_dataset"]
