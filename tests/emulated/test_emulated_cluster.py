"""The emulated cluster keeps its rates and quotas, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.emulated_cluster import ClusterSpec, EmulatedCluster, cgroups, network, ownership, requirements
from benchmarks.emulated_cluster.nursery import Nursery
from benchmarks.emulated_cluster.self_test import measure
from benchmarks.emulated_cluster.spec import parse_cpus, parse_rates

ROOT = Path(__file__).parents[2]
needs_root = pytest.mark.skipif(bool(requirements()), reason=f"an emulated cluster needs {'; '.join(requirements())}")


def made_by(name: str) -> list[str]:
    """What exists of a cluster."""
    found = [path.name for path in network.NAMESPACES.glob(f"{name}-*")]
    found += [str(path) for path in (cgroups.find_hierarchy().root / name, ownership.RECORDS / name) if path.exists()]
    return found


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@needs_root
def test_rates_and_quotas_are_kept_and_all_is_removed() -> None:
    spec = ClusterSpec(nics_bit_per_s=(200e6, 100e6, 200e6), cpus=(0.06, 0.2, 0.0))
    with EmulatedCluster(spec) as cluster:
        tries = [measure(cluster, transfer_s=1.0, compute_s=0.5) for _ in range(2)]
        name = cluster.name
        held_back = (cgroups.worker(name, 0) / "cpu.stat").read_text()
        assert made_by(name)
    assert made_by(name) == []
    # Node 0 sends to node 1, whose card is the slower. A rate is a ceiling, whatever else the machine does; how near
    # to it a transfer comes is the machine's business, so that the floor only tells that rate from another one.
    limit = 100e6 / 8
    for direction in ("one_way_bytes_per_s", "duplex_bytes_per_s"):
        assert max(max(found[direction]) for found in tries) < limit, direction
        assert max(min(found[direction]) for found in tries) > 0.5 * limit, direction
    for found in tries:
        share = found["cpu_share"]
        assert share[0] < 0.072 and share[1] < 0.24
    assert int(held_back.split("nr_throttled ")[1].split()[0]) > 0


BUSY_THREADS = """
import hashlib, pathlib, sys, threading, time
shares = {}
def work(name):
    time.sleep(0.5)  # until the quotas hold
    wall, cpu = time.monotonic(), time.thread_time()
    while time.monotonic() < wall + 1:
        hashlib.pbkdf2_hmac("sha256", b"a", b"b", 1000)  # without the interpreter's lock
    shares[name] = (time.thread_time() - cpu) / (time.monotonic() - wall)
other = threading.Thread(target=work, args=("other",))
other.start()
pathlib.Path(sys.argv[1]).write_text("begin")
work("main")
other.join()
pathlib.Path(sys.argv[2]).write_text(f"{shares['main']} {shares['other']}")
"""


@needs_root
@pytest.mark.skipif(
    bool(requirements()) or cgroups.find_hierarchy().version != 1, reason="cgroups version 2 limits whole processes"
)
def test_only_the_main_thread_is_on_the_quota_if_transfers_are_free(tmp_path: Path) -> None:
    begin, out = tmp_path / "begin", tmp_path / "out"
    spec = ClusterSpec(nics_bit_per_s=(0.0,), cpus=(0.05,), charge_transfers=False)
    with EmulatedCluster(spec) as cluster:
        name = cluster.name
        command = [sys.executable, "-c", BUSY_THREADS, str(begin), str(out)]
        assert cluster.run(command, throttle_when=begin, timeout_s=60) == 0
    main, other = map(float, out.read_text().split())
    assert main < 0.1 and other > 2 * main
    assert made_by(name) == []


@needs_root
def test_workers_get_the_environment_that_torchrun_gives(tmp_path: Path) -> None:
    script = (
        "import os, sys, pathlib; "
        "keys = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR GLOO_SOCKET_IFNAME'.split(); "
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(' '.join(os.environ[k] for k in keys)); "
        "sys.exit(7 if os.environ['RANK'] == '3' else 0)"
    )
    spec = ClusterSpec(nics_bit_per_s=(0.0, 0.0), cpus=(0.5, 0.5), workers_per_node=2)
    with EmulatedCluster(spec) as cluster:
        assert cluster.run([sys.executable, "-c", script, str(tmp_path)], timeout_s=60) == 7
    seen = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert seen == {str(r): f"{r} {r % 2} 4 2 {r // 2} 10.78.0.1 eth0" for r in range(4)}


@needs_root
def test_quotas_start_when_a_file_says_so(tmp_path: Path) -> None:
    signal_file = tmp_path / "metrics.jsonl"
    with EmulatedCluster(ClusterSpec(nics_bit_per_s=(0.0,), cpus=(0.25,))) as cluster:
        quota = cgroups.worker(cluster.name, 0)
        files = [quota / name for name in ("cpu.max", "cpu.cfs_quota_us") if (quota / name).exists()]
        run = cluster.start([sys.executable, "-c", "import time; time.sleep(30)"], throttle_when=signal_file)
        run.poll()
        assert files[0].read_text().split()[0] in ("-1", "max")
        signal_file.write_text("{}\n")
        run.poll()
        assert files[0].read_text().split()[0] == "2500"  # microseconds of 10 ms
        run.kill()


def start_cluster() -> tuple[subprocess.Popen[bytes], str]:
    """The command line with workers that sleep; returns the process and its cluster's name."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.emulated_cluster", "--nodes", "2", "--", "sleep", "600"],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"},
    )
    name = ""

    def running() -> bool:
        nonlocal name
        mine = [p.name for p in ownership.RECORDS.glob("*") if f": {process.pid}," in p.read_text()]
        name = mine[0] if mine else ""
        return bool(name) and len(workers(name)) == 2

    wait_for(running, "the cluster's workers did not start")
    return process, name


def workers(name: str) -> list[int]:
    files = (cgroups.find_hierarchy().root / name).rglob("cgroup.procs")
    return [int(line) for file in files for line in file.read_text().split()]


@needs_root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_all_is_removed_when_it_is_ended_by(number: signal.Signals) -> None:
    process, name = start_cluster()
    pids = workers(name)
    process.send_signal(number)
    assert process.wait(timeout=30) == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    wait_for(lambda: not made_by(name), f"left behind: {made_by(name)}")
    assert not [pid for pid in pids if ownership.started(pid)]


@needs_root
def test_the_next_start_removes_what_a_killed_one_left_and_nothing_else() -> None:
    alive, alive_name = start_cluster()
    killed, killed_name = start_cluster()
    try:
        for guard in (int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal()):
            words = command_line(guard)
            if words[-2:] == ["benchmarks.emulated_cluster.guard", killed_name]:
                os.kill(guard, signal.SIGKILL)
        killed.kill()
        killed.wait(timeout=30)
        time.sleep(0.2)
        assert made_by(killed_name)
        with EmulatedCluster(ClusterSpec(nics_bit_per_s=(0.0,), cpus=(0.0,))):
            assert made_by(killed_name) == []
            assert len(workers(alive_name)) == 2
    finally:
        alive.terminate()
        alive.wait(timeout=30)
    assert made_by(alive_name) == []


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    except OSError:
        return []


def test_rates_and_quotas_are_read() -> None:
    assert parse_rates("12.5mbit", 2) == (12.5e6, 12.5e6)
    assert parse_rates("0,1gbit", 2) == (0.0, 1e9)
    assert parse_cpus("0.2,1", 2) == (0.2, 1.0)
    for text in ("100", "fast", "1mbit,2mbit", "-1mbit"):
        with pytest.raises(ValueError, match=r"^--nic"):
            parse_rates(text, 3)
    with pytest.raises(ValueError, match="one, or one for each node"):
        parse_cpus("0.1,0.2", 3)
    with pytest.raises(ValueError, match="number of cores"):
        parse_cpus("20%", 1)


def test_a_quota_too_small_for_its_period_gets_a_longer_one() -> None:
    spec = ClusterSpec(nics_bit_per_s=(0.0,), cpus=(0.05,))
    assert spec.quota_s(0) == pytest.approx((0.001, 0.02))
    assert spec.burst(0) == 72_000


def test_the_cpu_controller_is_found_in_both_versions(tmp_path: Path) -> None:
    v1 = "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,nosuid,cpu,cpuacct 0 0"
    assert cgroups.find_hierarchy(v1) == cgroups.Hierarchy(Path("/sys/fs/cgroup/cpu,cpuacct"), 1)
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory\n")
    v2 = f"cgroup2 {tmp_path} cgroup2 rw 0 0"
    assert cgroups.find_hierarchy(v2) == cgroups.Hierarchy(tmp_path, 2)
    with pytest.raises(RuntimeError, match="no CPU controller"):
        cgroups.find_hierarchy("tmpfs /tmp tmpfs rw 0 0")


@pytest.mark.parametrize("options", [[], ["--self-test", "--", "true"]])
def test_the_command_line_wants_one_thing_to_do(options: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.emulated_cluster", *options],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "either a command after -- or --self-test" in done.stderr


@needs_root
def test_forked_workers_are_as_good_as_started_ones(tmp_path: Path) -> None:
    (tmp_path / "probe_me.py").write_text(
        "import os, sys, socket\n"
        "open(sys.argv[1] + os.environ['RANK'], 'w').write(' '.join(name for _, name in socket.if_nameindex()))\n"
        "sys.exit(int(os.environ['RANK']) * 3)\n"
    )
    spec = ClusterSpec(nics_bit_per_s=(0.0, 0.0), cpus=(0.5, 0.5))
    with EmulatedCluster(spec) as cluster, Nursery(["json"]) as nursery:
        run = cluster.start_forked(
            nursery, "probe_me", [f"{tmp_path}/seen"], log=tmp_path / "log", cwd=tmp_path, environment={"A": "1"}
        )
        pids = [process.pid for process in run.processes]
        assert run.wait(60) == 3, (tmp_path / "log").read_text()
        sent = cluster.sent_bytes()
    assert [process.returncode for process in run.processes] == [0, 3]
    assert [(tmp_path / f"seen{rank}").read_text() for rank in range(2)] == ["lo eth0"] * 2
    assert len(sent) == 2
    assert not [pid for pid in pids if ownership.started(pid)]
