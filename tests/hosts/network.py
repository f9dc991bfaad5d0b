"""Hosts made of network namespaces: each has an address of its own and a cable to one switch, which can be pulled."""

import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

SUBNET = "10.213.77"


class Host:
    def __init__(self, name: str, address: str, switch: str, port: str) -> None:
        self.address = address
        self._name = name
        self._switch = switch
        self._port = port

    @property
    def prefix(self) -> list[str]:
        """What a command line begins with to run here, with a shared memory that no other host sees."""
        private = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self._name, "unshare", "--mount", "sh", "-c", private, "sh"]

    def unplug(self) -> None:
        ip("-n", self._switch, "link", "set", self._port, "down")

    def plug_in(self) -> None:
        ip("-n", self._switch, "link", "set", self._port, "up")


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def hosts(names: Sequence[str]) -> Iterator[dict[str, Host]]:
    """Hosts on one network, which nothing else is on. Processes on them must have ended before this does."""
    token = uuid.uuid4().hex[:6]
    switch = f"streamrl-{token}-switch"
    made: list[str] = []
    try:
        ip("netns", "add", switch)
        made.append(switch)
        ip("-n", switch, "link", "add", "name", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        found: dict[str, Host] = {}
        for number, name in enumerate(names, start=1):
            namespace, port = f"streamrl-{token}-{name}", f"port{number}"
            ip("netns", "add", namespace)
            made.append(namespace)
            ip("-n", switch, "link", "add", "name", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("-n", switch, "link", "set", port, "master", "br0", "up")
            ip("-n", namespace, "address", "add", f"{SUBNET}.{number}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
            ip("-n", namespace, "link", "set", "lo", "up")
            found[name] = Host(namespace, f"{SUBNET}.{number}", switch, port)
        yield found
    finally:
        for namespace in made:
            ip("netns", "del", namespace)
