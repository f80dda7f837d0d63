"""How the tokens of a pass are dealt to sequence-parallel ranks; what the ranks then exchange is tested with processes."""

import pytest

from solarwm_lib.backbones.sequence_parallel import check_heads, deal
from solarwm_lib.runtime.errors import ConfigError


def test_whole_frames_are_dealt_the_first_ranks_taking_the_remainder():
    assert deal(21, 1560, 2) == (17160, 15600)  # spec wan22 8: 81 and 153 frames at 480x832
    assert deal(39, 1560, 2) == (31200, 29640)
    assert deal(42, 880, 2) == (18480, 18480)  # teacher forcing's [clean | noisy]
    assert deal(5, 6, 4) == (12, 6, 6, 6)


def test_fewer_frames_than_ranks_are_dealt_in_tokens():
    assert deal(3, 6, 4) == (5, 5, 4, 4)
    assert deal(1, 3, 3) == (1, 1, 1)
    with pytest.raises(ValueError, match="2 tokens cannot be shared by 4 sequence-parallel ranks"):
        deal(1, 2, 4)


def test_heads_that_do_not_divide_are_refused_with_the_key_and_legal_values():
    check_heads(40, 8)
    with pytest.raises(
        ConfigError, match=r"distributed\.sequence_parallel_size: found 3, .* 10 .*legal values: 1, 2, 5, 10$"
    ):
        check_heads(10, 3)
