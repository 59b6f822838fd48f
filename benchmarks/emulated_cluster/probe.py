"""One worker of the self-test: measures the network and the CPU from inside, over plain sockets.

Started by `self_test` on every worker; rank 0 prints one JSON object with what all have measured. Workers of the first
half of the ranks are senders of the many-to-many transfer, those of the second half its receivers.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
_PIECE = memoryview(bytes(256 * 1024))


class Mesh:
    """A connection between every two workers."""

    def __init__(self) -> None:
        self.peers: dict[int, socket.socket] = {}
        local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        base = int(os.environ["MASTER_PORT"])
        network, _, _ = os.environ["MASTER_ADDR"].rpartition(".")
        listener = socket.create_server(("0.0.0.0", base + RANK), backlog=WORLD)
        for rank in range(RANK):
            address = (f"{network}.{rank // local_size + 1}", base + rank)
            peer = _connect(address)
            peer.sendall(struct.pack("!i", RANK))
            self.peers[rank] = peer
        while len(self.peers) < WORLD - 1:
            peer, _ = listener.accept()
            (rank,) = struct.unpack("!i", _receive(peer, 4))
            self.peers[rank] = peer
        for peer in self.peers.values():
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.close()

    def barrier(self) -> None:
        if RANK:
            self.peers[0].sendall(b"x")
            _receive(self.peers[0], 1)
            return
        for peer in self.peers.values():
            _receive(peer, 1)
        for peer in self.peers.values():
            peer.sendall(b"x")

    def gather(self, value: float) -> list[float]:
        """All workers' values on rank 0, nothing elsewhere."""
        if RANK:
            self.peers[0].sendall(struct.pack("!d", value))
            return []
        return [value, *(struct.unpack("!d", _receive(self.peers[rank], 8))[0] for rank in range(1, WORLD))]

    def tell(self, value: int) -> int:
        """Rank 0's value, everywhere."""
        if RANK:
            return int(struct.unpack("!q", _receive(self.peers[0], 8))[0])
        for peer in self.peers.values():
            peer.sendall(struct.pack("!q", value))
        return value

    def exchange(self, send_to: dict[int, int], receive_from: dict[int, int]) -> None:
        """Send and receive these many bytes, all peers at once."""
        threads = [threading.Thread(target=_send, args=(self.peers[r], n)) for r, n in send_to.items()]
        threads += [threading.Thread(target=_drain, args=(self.peers[r], n)) for r, n in receive_from.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _connect(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(address, timeout=30)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _receive(peer: socket.socket, num_bytes: int) -> bytes:
    parts = b""
    while len(parts) < num_bytes:
        part = peer.recv(num_bytes - len(parts))
        if not part:
            raise ConnectionError("a worker of the self-test has gone")
        parts += part
    return parts


def _send(peer: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        sent = min(num_bytes, len(_PIECE))
        peer.sendall(_PIECE[:sent])
        num_bytes -= sent


def _drain(peer: socket.socket, num_bytes: int) -> None:
    buffer = memoryview(bytearray(256 * 1024))
    while num_bytes:
        got = peer.recv_into(buffer, min(num_bytes, len(buffer)))
        if not got:
            raise ConnectionError("a worker of the self-test has gone")
        num_bytes -= got


def timed(mesh: Mesh, function: Callable[[], Any]) -> list[float]:
    """Seconds that a function took on each worker, started together (on rank 0)."""
    mesh.barrier()
    start = time.monotonic()
    function()
    return mesh.gather(time.monotonic() - start)


def compute(num_products: int) -> None:
    a = np.full((256, 256), 0.5, np.float32)
    for _ in range(num_products):
        np.matmul(a, a)


Peers = tuple[dict[int, int], dict[int, int]]
"""Bytes to send to and to receive from each peer."""


def many_to_many(num_bytes: int) -> Peers:
    """Every rank of the first half sends to every one of the second, which get this much in all."""
    half = WORLD // 2
    share = max(1, num_bytes // half)
    first, second = range(half), range(half, 2 * half)
    return (dict.fromkeys(second, share) if RANK in first else {}), (
        dict.fromkeys(first, share) if RANK in second else {}
    )


def measure_network(mesh: Mesh, num_bytes: int) -> dict[str, Any]:
    """Bytes a second that each receiver got, and the latency. Each rank of the first half has a partner above it."""
    half = WORLD // 2
    first, second = range(half), range(half, 2 * half)
    partner = {(RANK + half) % (2 * half): num_bytes} if RANK in first or RANK in second else {}
    transfers: dict[str, tuple[Peers, range]] = {
        "one_way_bytes_per_s": ((partner if RANK in first else {}, partner if RANK in second else {}), second),
        "duplex_bytes_per_s": ((partner, partner), range(2 * half)),
        "many_to_many_bytes_per_s": (many_to_many(num_bytes), second),
    }
    found: dict[str, Any] = {}
    for key, (peers, receivers) in transfers.items():
        mesh.exchange(*(dict.fromkeys(side, 4096) for side in peers))  # makes the connections warm
        seconds = timed(mesh, partial(mesh.exchange, *peers))
        found[key] = [num_bytes / seconds[rank] for rank in receivers] if seconds else []
    return found | {"round_trip_s": round_trip_s(mesh)}


def measure_compute(mesh: Mesh, seconds: float) -> tuple[dict[str, Any], int]:
    """Cores that each worker got while all were busy, and its rate; also the matrix products this one finished."""
    mesh.barrier()
    count, start, used = 0, time.monotonic(), time.process_time()
    while time.monotonic() - start < seconds:
        compute(1)
        count += 1
    took = time.monotonic() - start
    share = mesh.gather((time.process_time() - used) / took)
    return {"cpu_share": share, "flops_per_s": mesh.gather(count * 2 * 256**3 / took)}, count


def measure_overlap(mesh: Mesh, num_products: int, num_bytes: int) -> dict[str, Any]:
    """A computation and a many-to-many transfer, each alone and both together."""
    transfer = partial(mesh.exchange, *many_to_many(num_bytes))
    work = partial(compute, num_products)

    def both() -> None:
        thread = threading.Thread(target=transfer)
        thread.start()
        work()
        thread.join()

    moved, worked, together = (max(timed(mesh, f), default=0.0) for f in (transfer, work, both))
    if RANK:
        return {}
    overlap = (moved + worked - together) / min(moved, worked)
    return {"transfer_s": moved, "compute_s": worked, "together_s": together, "overlap": overlap}


def measure(mesh: Mesh, num_bytes: int, compute_s: float) -> dict[str, Any]:
    """Everything; meaningful on rank 0."""
    network = measure_network(mesh, num_bytes)
    cpu, count = measure_compute(mesh, compute_s)
    # As long as the computation, so that hiding one behind the other would halve the time.
    part = mesh.tell(0 if RANK else int(compute_s * min(network["many_to_many_bytes_per_s"])))
    return network | cpu | measure_overlap(mesh, count, part)


def round_trip_s(mesh: Mesh, repeats: int = 50) -> float:
    """Median round trip of one byte between rank 0 and the first worker of the other half."""
    mesh.barrier()
    other = WORLD // 2
    times = []
    for _ in range(repeats):
        start = time.monotonic()
        if not RANK:
            mesh.peers[other].sendall(b"x")
            _receive(mesh.peers[other], 1)
        elif other == RANK:
            _receive(mesh.peers[0], 1)
            mesh.peers[0].sendall(b"x")
        times.append(time.monotonic() - start)
    mesh.barrier()
    return sorted(times)[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--compute-s", type=float, required=True)
    arguments = parser.parse_args()
    found = measure(Mesh(), arguments.bytes, arguments.compute_s)
    if not RANK:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
