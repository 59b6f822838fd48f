"""Presets: a cluster, a model and batch, the systems to compare on them, and the grids that baselines are tuned over.

    title = "..."                     what the preset stands for
    description = "..."
    [cluster]                         nodes, workers_per_node, nic, and the workers' speed (see `pace`) or cpu and
                                      perhaps period_ms, free_transfers: as the options of benchmarks.emulated_cluster
    [config.SECTION]                  configuration of the trainer that all systems share
    [systems.NAME]                    title, perhaps against = "SYSTEM", and either
        config.SECTION.key = ...          what the system adds to it, or
        tuned = "GRID"                    the fastest of a grid, from NAME_OF_PRESET.tuned.json
    [[grids.GRID]]                    SECTION.key = value or list of values; all combinations of a table are tried

The system `af_pipe` is what the others are compared with, unless `against` names another. A *fitted* order is made for
costs measured in the same layout (see `fit`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from benchmarks.emulated_cluster import ClusterSpec, parse_cpus, parse_rates
from disagmoe.config.checks import build_layout, check_config
from disagmoe.config.errors import ConfigError
from disagmoe.config.load import ResolvedConfig, load_config

FOLDER = Path(__file__).parents[1] / "presets"
EMPTY = Path(__file__).with_name("empty.toml")
OURS = "af_pipe"
Overrides = dict[str, Any]
"""Values by `section.key`."""


@dataclass(frozen=True, kw_only=True)
class System:
    """One way to train the preset's model."""

    name: str
    title: str
    overrides: Overrides
    """Complete: the preset's shared configuration and the system's own."""
    against: str = OURS
    """The system that it is compared with."""

    @property
    def arguments(self) -> list[str]:
        """Options of disagmoe.train."""
        return [f"--{key}={_text(value)}" for key, value in self.overrides.items()]


@dataclass(frozen=True, kw_only=True)
class Preset:
    name: str
    title: str
    description: str
    cluster: ClusterSpec
    speed: float
    """Of each worker, as a share of this machine's (see `pace`); 1: full speed, whatever the quotas allow."""
    shared: Overrides
    tables: Mapping[str, Any]
    grids: Mapping[str, Any]

    @property
    def tuned_path(self) -> Path:
        return FOLDER / f"{self.name}.tuned.json"

    def tuned(self) -> dict[str, Any]:
        """Results of tuning, by grid; empty before the first."""
        return dict(json.loads(self.tuned_path.read_text())) if self.tuned_path.exists() else {}

    def systems(self, only: Collection[str] = ()) -> list[System]:
        """All systems, or those named, ours first.

        Raises:
            ValueError: one wants a tuned configuration, and there is none.
        """
        tuned = self.tuned()
        systems = []
        for name in only:
            if name not in self.tables:
                raise ValueError(f"preset {self.name} has no system {name}, but {', '.join(self.tables)}")
        for name, table in self.tables.items():
            if only and name not in only:
                continue
            own = _flat(table.get("config", {}))
            if "tuned" in table:
                if table["tuned"] not in tuned.get("grids", {}):
                    raise ValueError(
                        f'preset {self.name}, system {name}: grid "{table["tuned"]}" has not been tuned; run '
                        f"python -m benchmarks.side_by_side --preset {self.name} --tune"
                    )
                own = dict(tuned["grids"][table["tuned"]]["best"]) | own
            against = table.get("against", OURS)
            systems.append(System(name=name, title=table["title"], overrides=self.shared | own, against=against))
        return sorted(systems, key=lambda system: system.name != OURS)

    def candidates(self, grid: str) -> Iterator[Overrides]:
        """What a grid tries: its combinations that the trainer accepts and that need all workers."""
        for table in self.grids[grid]:
            flat = _flat(table)
            lists = [value if isinstance(value, list) else [value] for value in flat.values()]
            for values in itertools.product(*lists):
                own = dict(zip(flat, values, strict=True))
                try:
                    resolved = resolve(self.shared | own)
                    check_config(resolved)
                except ConfigError:
                    continue
                if build_layout(resolved.config).world_size == self.cluster.world_size:
                    yield own


def load_preset(name: str) -> Preset:
    """A preset of benchmarks/presets/.

    Raises:
        ValueError: there is none of this name; with the names there are.
    """
    path = FOLDER / f"{name}.toml"
    if not path.exists():
        raise ValueError(f"--preset {name}: must be one of {', '.join(preset_names())}")
    tree = tomli.loads(path.read_text())
    cluster = tree["cluster"]
    return Preset(
        name=name,
        title=tree["title"],
        description=tree["description"].strip(),
        cluster=ClusterSpec(
            nics_bit_per_s=parse_rates(cluster["nic"], cluster["nodes"]),
            cpus=parse_cpus(cluster.get("cpu", "0"), cluster["nodes"]),
            workers_per_node=cluster["workers_per_node"],
            period_s=cluster.get("period_ms", 10.0) / 1e3,
            charge_transfers=not cluster.get("free_transfers", False),
        ),
        speed=cluster.get("speed", 1.0),
        shared=_flat(tree["config"]),
        tables=tree["systems"],
        grids=tree.get("grids", {}),
    )


def preset_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def resolve(overrides: Overrides) -> ResolvedConfig:
    """The trainer's configuration of a system.

    Raises:
        ConfigError: the trainer would refuse it.
    """
    return load_config(EMPTY, System(name="", title="", overrides=overrides).arguments)


def layout_text(overrides: Overrides) -> str:
    """A system's layout in a few words."""
    config = resolve(overrides).config
    if config.parallelism.mode == "disagmoe":
        part = config.disagmoe
        split = ", split backward" if part.split_backward else ""
        depth = f", {part.in_flight} in flight" if part.in_flight else ""
        placed = f" (placed {' '.join(map(str, part.attn_placement))})" if part.attn_placement else ""
        return (
            f"{part.attn_depth} x {part.attn_workers} A{placed} + {part.ffn_depth} x {part.ffn_workers} F, "
            f"{part.microbatches} micro-batches, {part.schedule}{split}{depth}"
        )
    ep = config.expert_parallel
    chunks = f" x {ep.chunks_per_rank} chunks" if ep.chunks_per_rank > 1 else ""
    replicas = f", {ep.replicas} replicas" if ep.replicas > 1 else ""
    overlap = {"none": "", "chunked": f", cut in {ep.num_chunks}", "dual_pipe_v": ", DualPipeV"}[ep.overlap]
    rows = "de-duplicated rows" if ep.deduplicate else "a row for each expert"
    layout = f"PP {ep.pipeline_depth}{chunks}, EP {ep.expert_workers}{replicas}"
    return f"{layout}, {ep.microbatches} micro-batches{overlap}, {rows}"


def _flat(tree: Mapping[str, Any]) -> Overrides:
    """`section.key` to value."""
    return {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, list) else str(value)
