"""Dynamic loss scaling for gradients in float16 (arXiv 1710.03740, with the numbers of `torch.amp.GradScaler`).

The smallest float16 is 6e-8: with a million tokens in a step the gradient of one token vanishes. The loss is multiplied
by a power of two before the backward pass, and the reduced gradients, which are float32, are divided by it.

Guarantees:
1. a pass whose gradient overflows is repeated with half the scale, on the same batch and weights: no sample is lost or
   trained twice, and versions do not change (docs/adr/0024-an-overflow-repeats-the-pass.md);
2. all ranks agree, because the norm of the whole gradient decides;
3. an update alone changes the scale that is kept: a replay without the passes that led to no update (a bad group, a
   probe) gets the same bits;
4. a gradient that is not finite at scale 1 is the fault of the batch: it is returned as it is.

Example: an overflow at 65536 repeats the pass at 32768; after 2000 updates without another one the scale is 65536
again.
"""

from __future__ import annotations

import torch
from torch import Tensor

START = 2.0**16
LEAST, MOST = 1.0, 2.0**24  # a gradient of zeros would let it grow without end
GROWTH_UPDATES = 2000
#: Name of the kept tensor in a checkpoint.
LOSS_SCALE = "loss_scale"


class LossScale:
    """The scale of one model. `kept` [2]: the scale of the next step, and updates since it changed."""

    def __init__(self) -> None:
        self.kept: Tensor = torch.tensor([START, 0.0], dtype=torch.float64)
        self.now = START  # of the current passes
        self._overflows = 0  # repeated passes

    def begin(self) -> None:
        """Start the passes of a mini-batch."""
        self.now = float(self.kept[0])

    def lower(self) -> bool:
        """Halve it after an overflow. Return False at its least: the pass is not repeated."""
        if self.now <= LEAST:
            return False
        self.now /= 2
        self._overflows += 1
        return True

    def take_overflows(self) -> int:
        """Return and reset the number of repeated passes."""
        found, self._overflows = self._overflows, 0
        return found

    def settle(self) -> None:
        """Keep the scale of the passes that led to an update."""
        scale, updates = self.now, 1.0 + (float(self.kept[1]) if self.now == float(self.kept[0]) else 0.0)
        if updates >= GROWTH_UPDATES:
            scale, updates = min(2 * scale, MOST), 0.0
        self.kept.copy_(torch.tensor([scale, updates]))
