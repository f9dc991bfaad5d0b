"""Whether a second set of weights fits, by the numbers that SGLang sizes its KV cache by."""

from __future__ import annotations

from streamrl.engines.sglang.plugin.choice import memory_short

GB = 1_000_000_000


def test_a_trainer_on_the_same_gpu_is_not_counted_twice() -> None:
    # 80 GB, of which a trainer had 30 before the server began: SGLang leaves 60 % of the other 50 free, and 18.6 are left for its cache.
    assert memory_short(int(48.8 * GB), 50 * GB, int(1.2 * GB), fraction=0.4, reserve=0.05) == ""
    # What the trainer has taken since then is gone.
    assert memory_short(int(31.2 * GB), 50 * GB, int(1.2 * GB), fraction=0.4, reserve=0.05)


def test_a_buffer_that_leaves_no_cache_is_named() -> None:
    said = memory_short(62 * GB, 80 * GB, 18 * GB, fraction=0.4, reserve=0.05)
    assert "18.0 GB would leave 0.0 GB" in said and "0.4 of 80.0 GB, 4.0 GB wanted" in said
    assert memory_short(62 * GB, 80 * GB, 10 * GB, fraction=0.5, reserve=0.05) == ""
