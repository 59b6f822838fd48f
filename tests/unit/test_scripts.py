"""run_train.sh and run_tests.sh: refusals without a process started, and how the environment is found or made."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from disagmoe.config.checks import build_layout
from disagmoe.config.load import load_config

ROOT = Path(__file__).parents[2]
SCRIPTS = ["run_train.sh", "run_tests.sh", "slurm_train.sh", ".ci/run"]
FORGOTTEN = ("CONFIG_FILE", "NGPU", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "LOG_RANK", "OMP_NUM_THREADS")


def run_script(
    script: Path | str, *arguments: str, cwd: Path, path: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of the tree with the Python of the tests first on PATH."""
    environ = {k: v for k, v in os.environ.items() if k not in FORGOTTEN}
    environ["PATH"] = path or f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(ROOT / script), *arguments],
        cwd=cwd,
        env=environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_is_executable_bash(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


def test_help_needs_no_environment(tmp_path: Path) -> None:
    for script in ("run_train.sh", "run_tests.sh"):
        done = run_script(script, "--help", cwd=tmp_path, path="/usr/bin:/bin")
        assert done.returncode == 0
        assert done.stdout.startswith("Usage: ")
        assert done.stderr == ""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "mine.toml").write_text('[recipe]\nname = "qwen3"\n')
    return "mine.toml"


REFUSED = [
    (["--training.stepz=3"], {}, "command line: --training.stepz", "did you mean --training.steps?"),
    (["--training.steps", "0"], {}, "command line: training.steps = 0", "at least 1"),
    ([], {"NGPU": "3"}, "environment: NGPU = 3", "set NGPU=4"),
    ([], {"CONFIG_FILE": "main.toml"}, "main.toml: there is no such file", "did you mean mine.toml?"),
    (["--dump_folder=used"], {}, "holds an earlier run", "add --dump_folder=used_2"),
    ([], {"NNODES": "2"}, "set MASTER_ADDR", "NNODES = 2"),
]


@pytest.mark.parametrize(("options", "variables", "said", "advice"), REFUSED)
def test_bad_runs_are_refused_quickly_and_nothing_is_started(
    tmp_path: Path, config: str, options: list[str], variables: dict[str, str], said: str, advice: str
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "config.toml").touch()
    start = time.monotonic()
    done = run_script("run_train.sh", *options, cwd=tmp_path, **({"CONFIG_FILE": config} | variables))
    assert time.monotonic() - start < 10
    assert done.returncode != 0
    assert said in done.stderr
    assert advice in done.stderr
    # Neither torchrun's summary nor a worker's traceback: there was no process to fail.
    assert "FAILED" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outputs").exists()


def test_slurm_example_asks_for_the_processes_of_its_configuration() -> None:
    text = (ROOT / "slurm_train.sh").read_text()
    nodes, gpus, config = (
        re.search(pattern, text)[1]  # type: ignore[index]
        for pattern in (r"--nodes=(\d+)", r"--gpus-per-node=(\d+)", r"CONFIG_FILE:-([\w/.]+)}")
    )
    assert int(nodes) * int(gpus) == build_layout(load_config(ROOT / config).config).world_size


def stub(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the scripts need, and a bin/ with only the commands that they may use."""
    tree = tmp_path / "a tree"
    shutil.copytree(ROOT / "scripts", tree / "scripts")
    for name in ("run_train.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, tree / name)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for command in ("bash", "env", "dirname", "readlink", "cat", "cksum", "grep", "mv", "mkdir", "nproc", "flock"):
        found = shutil.which(command)
        assert found is not None
        (bin_folder / command).symlink_to(found)
    return tree


OLD = 'case "$*" in *platform*) echo 3.9.1 ;; *) exit 1 ;; esac'
WITHOUT_VENV = 'case "$*" in *ensurepip* | *-P*) exit 1 ;; *platform*) echo 3.12.0 ;; esac'


@pytest.mark.parametrize(
    ("pythons", "said"),
    [
        ({}, "needs Python >= 3.11 and found none"),
        ({"python3": OLD}, "needs Python >= 3.11 and found python3 (3.9.1)"),
        ({"python3": OLD, "python3.12": WITHOUT_VENV}, "python3.12 lacks the venv module; install it (Debian, Ubuntu"),
    ],
)
def test_says_what_is_missing_to_make_an_environment(tree: Path, pythons: dict[str, str], said: str) -> None:
    bin_folder = tree.parent / "bin"
    for name, body in pythons.items():
        stub(bin_folder, name, body)
    done = run_script(tree / "run_train.sh", cwd=tree, path=str(bin_folder))
    assert done.returncode == 1
    assert said in done.stderr


# Stands for a Python of the system: makes environments whose Python records what it is asked to install and run.
SYSTEM_PYTHON = """
case "$*" in
*sys.executable*) echo "$0" ;;
"-P "*) exit 1 ;;
"-m venv "*)
    mkdir -p "$3/bin"
    cat >"$3/bin/python" <<'PY'
#!/usr/bin/env bash
case "$*" in
"-P "*) [ -e "$LOG" ] ;;
"-m pip install "*) echo "install ${*: -1}" >>"$LOG" ;;
"-m disagmoe.cli check "*) echo 4 ;;
"-m torch.distributed.run "*) echo "run threads=$OMP_NUM_THREADS $*" >>"$LOG"; exit 7 ;;
esac
PY
    "$CHMOD" +x "$3/bin/python"
    ;;
esac
"""


def test_makes_an_environment_once_and_installs_again_when_requirements_change(tree: Path) -> None:
    log = tree.parent / "log"
    bin_folder = tree.parent / "bin"
    stub(bin_folder, "python3", SYSTEM_PYTHON)
    chmod = shutil.which("chmod")
    assert chmod is not None

    def train() -> tuple[str, list[str]]:
        before = log.read_text().splitlines() if log.exists() else []
        variables = {"LOG": str(log), "CHMOD": chmod}
        done = run_script(tree / "run_train.sh", "--a.b=c d", cwd=tree.parent, path=str(bin_folder), **variables)
        assert done.returncode == 7, done.stderr  # torchrun's own
        return done.stderr, log.read_text().splitlines()[len(before) :]

    said, done = train()
    assert f"making an environment in {tree}/.venv" in said
    assert done[0] == "install ."
    threads = max(1, len(os.sched_getaffinity(0)) // 4)
    assert done[1].startswith(f"run threads={threads} -m torch.distributed.run --nproc-per-node=4 ")
    assert done[1].endswith("-m disagmoe.train --config-file=train_configs/debug_deepseek_moe.toml --a.b=c d")
    assert len(done) == 2
    said, done = train()
    assert said == ""
    assert len(done) == 1
    with (tree / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    said, done = train()
    assert "installing this tree into" in said
    assert "making" not in said
    assert done[0] == "install ."
