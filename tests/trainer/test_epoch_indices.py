"""The order of the prompts in any epoch is that of TRL's sampler, which walked through the epochs before."""

import pytest
from trl.trainer.utils import RepeatSampler

from basis_rl.trainer.selection import EpochIndices


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_resumed_epoch_is_that_of_a_run_from_the_start(shuffle):
    given = {"data_source": range(10), "mini_repeat_count": 2, "batch_size": 3, "repeat_count": 2, "seed": 5}
    theirs = RepeatSampler(**given, shuffle=shuffle)
    whole = [list(theirs) for _ in range(4)]
    assert (len({tuple(order) for order in whole}) > 1) == shuffle
    for epoch in (0, 3, 1):
        ours = EpochIndices(epoch=lambda epoch=epoch: epoch, **given, shuffle=shuffle)
        assert list(ours) == whole[epoch]
        assert list(ours) == whole[epoch], "as often as it is asked"
