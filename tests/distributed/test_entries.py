"""The ways in besides `run_train.sh`: the library example of the documentation, and a recipe under a new name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}


def test_the_library_example_trains(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/library.md").read_text(), re.M | re.S)
    script = tmp_path / "my_trainer.py"
    script.write_text(example)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    outcome = subprocess.run(
        [*command, "--nproc-per-node=4", str(script)], capture_output=True, text=True, env=ENVIRONMENT, timeout=240
    )
    assert outcome.returncode == 0, outcome.stderr
    lines = re.findall(r"step (\d): share ([\d.]+), gradient norm ([\d.]+)", outcome.stdout)
    assert len(lines) == 5 * 2  # the two A-workers, whose group has the head
    losses = {step: sum(float(share) for s, share, _ in lines if s == step) for step in "01234"}
    assert 5.3 < losses["0"] < 6.0
    for step in losses:
        assert len({norm for s, _, norm in lines if s == step}) == 1


COPIES = """
import sys
from pathlib import Path
import recipes
recipes.__path__.append(sys.argv[1])
from disagmoe.train import main
for name in sys.argv[2:]:
    code = main([f"--config-file={sys.argv[1]}/{name}.toml", f"--dump_folder={sys.argv[1]}/out_{name}"])
    assert code == 0, name
"""


def test_a_copied_recipe_trains(tmp_path: Path) -> None:
    names = []
    for recipe in sorted((ROOT / "recipes").glob("[a-z]*.py")):
        name = f"my_{recipe.stem}"
        shutil.copy(recipe, tmp_path / f"{name}.py")
        (tmp_path / f"{name}.toml").write_text(
            f'[recipe]\nname = "{name}"\n'
            "[disagmoe]\ncolocate = true\nattn_workers = 1\nffn_workers = 1\nmicrobatches = 2\n"
            "[training]\nsteps = 2\nseq_len = 32\nglobal_batch_size = 4\n"
        )
        names.append(name)
    assert len(names) >= 3
    outcome = subprocess.run(
        [sys.executable, "-c", COPIES, str(tmp_path), *names],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=240,
    )
    assert outcome.returncode == 0, outcome.stderr
    for name in names:
        lines = (tmp_path / f"out_{name}/metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line)["loss"] for line in lines]
        assert len(losses) == 2 and losses[1] < losses[0]
