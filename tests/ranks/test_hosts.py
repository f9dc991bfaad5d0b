"""Ranks of a model that is cut must share the memory in which they publish."""

from streamrl.consumers.training.ranks import check_hosts
from streamrl.errors import ConfigError
from tests.support.errors import raises


def test_parts_on_several_hosts_are_refused_by_the_transports_name() -> None:
    check_hosts("shm", [7])
    check_hosts("shm", [7, 7])
    with raises(ConfigError, key="weights.transport", ranks=[1, 3]) as caught:
        check_hosts("ipc", [7, 8, 7, 9])
    assert "weights.transport = ipc" in caught.value.message and "'bus'" in caught.value.hint
