"""A network namespace a node, joined by a bridge in one of its own; each card limited in both directions.

    node 0: eth0 (10.78.0.1) --- port0 \\
    node 1: eth0 (10.78.0.2) --- port1 --- bridge        all in namespaces NAME-node0, NAME-node1, ..., NAME-switch

A token-bucket filter (tbf) on eth0 limits what a node sends, one on its port what it receives. Nothing appears in the
machine's own namespace, so no address or interface name can clash, and a cluster has no way out.
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path

from benchmarks.emulated_cluster.commands import call
from benchmarks.emulated_cluster.spec import ClusterSpec

NAMESPACES = Path("/run/netns")
INTERFACE = "eth0"
# Jumbo frames. What a worker receives is charged to its CPU quota by the packet: with frames of 1,500 bytes receiving
# would cost four times as much, which no network card of a GPU does.
MTU_BYTES = 9000
_CLONE_NEWNET = 0x40000000
# Of a namespace, under /proc/sys: a worker that has computed for a while must not probe for bandwidth again, and a
# model of the path that was learnt under other limits must not be remembered.
_SETTINGS = {
    "net/ipv4/tcp_congestion_control": "cubic",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
}


def address(node: int) -> str:
    return f"10.78.0.{node + 1}"


def namespace(name: str, node: int) -> str:
    return f"{name}-node{node}"


def make(name: str, spec: ClusterSpec) -> None:
    """Make the namespaces, cards and limits of cluster `name`."""
    switch = f"{name}-switch"
    call("ip", "netns", "add", switch)
    call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge", "stp_state", "0")
    call("ip", "-n", switch, "link", "set", "bridge", "up")
    for node in range(spec.nodes):
        own, port = namespace(name, node), f"port{node}"
        call("ip", "netns", "add", own)
        # fmt: off
        call("ip", "link", "add", INTERFACE, "netns", own, "type", "veth", "peer", "name", port, "netns", switch)
        # fmt: on
        call("ip", "-n", own, "addr", "add", f"{address(node)}/24", "dev", INTERFACE)
        call("ip", "-n", own, "link", "set", "lo", "up")
        call("ip", "-n", own, "link", "set", INTERFACE, "mtu", str(MTU_BYTES), "up")
        call("ip", "-n", switch, "link", "set", port, "mtu", str(MTU_BYTES), "master", "bridge", "up")
        _in_namespace(own, _set_up)
    limit(name, spec)


def limit(name: str, spec: ClusterSpec) -> None:
    """Give every card its rate, in place of the one that it had."""
    for node, rate in enumerate(spec.nics_bit_per_s):
        for where, device in ((namespace(name, node), INTERFACE), (f"{name}-switch", f"port{node}")):
            if rate:
                # fmt: off
                call("tc", "-n", where, "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{rate:.0f}bit",
                     "burst", str(spec.burst(node)), "latency", f"{spec.queue_s * 1e3:g}ms")
                # fmt: on
            elif "tbf" in call("tc", "-n", where, "qdisc", "show", "dev", device):
                call("tc", "-n", where, "qdisc", "del", "dev", device, "root")


def sent_bytes(where: str) -> int:
    """What the card of a namespace has sent."""
    (link,) = json.loads(call("ip", "-n", where, "-s", "-j", "link", "show", "dev", INTERFACE))
    return int(link["stats64"]["tx"]["bytes"])


def remove(name: str) -> None:
    """Remove the namespaces, and with them all that is in them."""
    for entry in sorted(NAMESPACES.glob(f"{name}-*")) if NAMESPACES.exists() else []:
        call("ip", "netns", "del", entry.name)


def enter(name: str) -> None:
    """Move the calling thread into a namespace. `ip netns exec` would hide the cgroups by mounting /sys anew."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(NAMESPACES / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(handle, _CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, f"cannot enter network namespace {name}: {os.strerror(error)}")
    finally:
        os.close(handle)


def _set_up() -> None:
    for key, value in _SETTINGS.items():
        # Missing or refused where the kernel is built without it: then the default has to do.
        try:
            Path("/proc/sys", key).write_text(value)
        except OSError:
            continue


def _in_namespace(name: str, function: object) -> None:
    """Call `function` in a child process inside the namespace."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            enter(name)
            function()  # type: ignore[operator]
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError(f"could not set up network namespace {name}")
