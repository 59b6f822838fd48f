"""Cluster descriptions: the shipped ones load, wrong ones are refused with key, value and rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagmoe.config.cluster import CLUSTERS, cluster_names, load_cluster
from disagmoe.config.errors import ConfigError

TEXT = (CLUSTERS / "h800x16.toml").read_text()


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", cluster_names())
def test_shipped_descriptions_load(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster == load_cluster(CLUSTERS / f"{name}.toml")


def test_the_papers_cluster() -> None:
    cluster = load_cluster("h800x16")
    pool = cluster.pools[0]
    assert (cluster.num_gpus, pool.nic_bytes_per_s_per_gpu, pool.gpu.peak("bfloat16")) == (128, 50e9, 989e12)
    assert [cluster.place(rank)[1] for rank in (0, 7, 8, 127)] == [0, 0, 1, 15]
    with pytest.raises(ValueError, match="rank 128 has no place: cluster h800x16 has 128 GPUs"):
        cluster.place(128)
    with pytest.raises(ValueError, match="no peak_flops_per_s for dtype int4, only for bfloat16"):
        pool.gpu.peak("int4")
    with pytest.raises(ValueError, match=r"efficiency nic = 1.5: must be above 0, at most 1"):
        cluster.with_efficiency(nic=1.5)
    assert cluster.with_efficiency(all_to_all=0.5).pools[0].efficiency.all_to_all == 0.5


def test_pools_of_several_gpu_types(tmp_path: Path) -> None:
    second = TEXT[TEXT.index("[[pools]]") :].replace('"h800"', '"old"').replace("nodes = 16", "nodes = 2")
    cluster = load_cluster(write(tmp_path, TEXT + second.replace("gpus_per_node = 8", "gpus_per_node = 4")))
    assert cluster.num_gpus == 136
    pool, node = cluster.place(133)
    assert (pool.name, node) == ("old", 17)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nodes = 16", "nodes = 0", "pools[0].nodes = 0: must be an integer, at least 1"),
        ("nodes = 16", "nodes = true", "pools[0].nodes = true: must be an integer, at least 1"),
        ("nodes = 16", "node = 16", "pools[0].node = 16: unknown key; did you mean pools[0].nodes?"),
        ("nodes = 16", "", "pools[0].nodes: is missing; it must be an integer, at least 1"),
        ("nic = 0.8", "nic = 1.2", "pools[0].efficiency.nic = 1.2: must be a finite number, above 0, at most 1"),
        ("nic = 0.8", 'nic = "fast"', "pools[0].efficiency.nic = \"fast\": must be a finite number"),
        ("bfloat16 = 989e12", "bfloat16 = -1.0", "pools[0].gpu.peak_flops_per_s.bfloat16 = -1.0: must be a finite"),
        ("[pools.fabric]", "[pools.fabrics]", "pools[0].fabric: is missing; it must be a section with bytes_per_s"),
        ("[[pools]]", "[pools]", "pools: must be an array of sections ([[pools]])"),
        ('name = "h800x16"', 'name = "h800x16', "not valid TOML"),
    ],
)  # fmt: skip
def test_wrong_descriptions_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TEXT
    path = write(tmp_path, TEXT.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_names_of_pools_differ(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT + TEXT[TEXT.index("[[pools]]") :])
    with pytest.raises(ConfigError, match="pool names must differ, got h800, h800"):
        load_cluster(path)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r'"h800-16": no such file in clusters/.*did you mean h800x16\?'):
        load_cluster("h800-16")
